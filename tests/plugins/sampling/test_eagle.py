"""The EAGLE layer: published files, the definition in float64, the suite of every speculator, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from pegboard import ConfigError, Engine, SamplingParams
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import DraftContext, HeadText, HeadTraining
from pegboard.heads.attention import attend_in_torch
from pegboard.testing import SpeculatorSuite
from pegboard.testing.conformance import Candidate
from pegboard.testing.speculator import TARGET, StandInTarget
from pegboard_sampling.speculation import eagle_training
from pegboard_sampling.speculation.eagle import EagleSpeculator
from pegboard_sampling.speculation.eagle_training import EagleTrainer
from pegboard_sampling.speculation.options import EagleOptions

HEADS, KV_HEADS, HEAD_SIZE, INNER, EPS, THETA = 4, 2, 8, 48, 1e-5, 10000.0


def write_layer(
    path: Path,
    *,
    size: int = TARGET.hidden_size,
    embedding: int | None = None,
    biases: bool = False,
    dtype: torch.dtype = torch.float32,
    more: Mapping[str, tuple[int, ...]] | None = None,
    **others: Any,
) -> Path:
    """As it is published, with random weights."""
    generator = torch.Generator().manual_seed(0)
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 2 * size),
        f"{attention}.q_proj.weight": (HEADS * HEAD_SIZE, size),
        f"{attention}.k_proj.weight": (KV_HEADS * HEAD_SIZE, size),
        f"{attention}.v_proj.weight": (KV_HEADS * HEAD_SIZE, size),
        f"{attention}.o_proj.weight": (size, HEADS * HEAD_SIZE),
        "layers.0.post_attention_layernorm.weight": (size,),
        f"{mlp}.gate_proj.weight": (INNER, size),
        f"{mlp}.up_proj.weight": (INNER, size),
        f"{mlp}.down_proj.weight": (size, INNER),
        **(more or {}),
    }
    if biases:
        shapes |= {"fc.bias": (size,), f"{attention}.q_proj.bias": (HEADS * HEAD_SIZE,)}
        shapes |= {f"{attention}.{part}_proj.bias": (KV_HEADS * HEAD_SIZE,) for part in "kv"}
    if embedding is not None:
        shapes["embed_tokens.weight"] = (embedding, size)
    tensors = {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[-1]) + ("layernorm" in name)
        for name, shape in shapes.items()
    }
    path.mkdir(parents=True)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(config | others), encoding="utf-8")
    return path


class Definition:
    """The paper's draft model in float64, from scratch for every entry: no cache, no batch."""

    def __init__(self, path: Path, target: StandInTarget) -> None:
        self.w = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
        self.embedding = self.w.get("embed_tokens.weight", target.embedding.double())
        self.matrix = target.matrix.double()

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, D]"""
        half = HEAD_SIZE // 2
        angles = positions[:, None].double() * THETA ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        out = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((out.real, out.imag), -1)

    def states(self, ids: Sequence[int], hidden: Sequence[Tensor], first: int) -> Tensor:
        """[n, E] for entries of tokens and the states that they were chosen from, the first at position `first`."""
        count = len(ids)
        x = torch.cat((self.embedding[torch.tensor(ids)], torch.stack([h.double() for h in hidden])), -1)
        x = self.linear(x, "fc")
        at, positions = "layers.0.self_attn", first + torch.arange(count)
        q = self.turned(self.linear(x, f"{at}.q_proj").view(count, HEADS, HEAD_SIZE), positions)
        k = self.turned(self.linear(x, f"{at}.k_proj").view(count, KV_HEADS, HEAD_SIZE), positions)
        v = self.linear(x, f"{at}.v_proj").view(count, KV_HEADS, HEAD_SIZE)
        mixed = torch.zeros(count, HEADS, HEAD_SIZE, dtype=torch.float64)
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            for place in range(count):
                scores = k[: place + 1, own] @ q[place, head] / math.sqrt(HEAD_SIZE)
                mixed[place, head] = scores.softmax(0) @ v[: place + 1, own]
        x = x + self.linear(mixed.flatten(1), f"{at}.o_proj")
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        y = y * self.w["layers.0.post_attention_layernorm.weight"]
        gate, up = self.linear(y, "layers.0.mlp.gate_proj"), self.linear(y, "layers.0.mlp.up_proj")
        return x + self.linear(gate * torch.sigmoid(gate) * up, "layers.0.mlp.down_proj")

    def drafts(self, text: Sequence[int], hidden: Sequence[Tensor], first: int, count: int) -> list[int]:
        """After a text whose tokens from `first` to the last but one have these states."""
        ids, states = list(text[first + 1 :]), list(hidden)
        found: list[int] = []
        while len(found) < count:
            state = self.states(ids, states, first)[-1]
            found.append(int((self.matrix @ state).argmax()))
            ids.append(found[-1])
            states.append(state)
        return found


class TestEagle(SpeculatorSuite):
    part = EagleSpeculator
    claims = ("probs",)
    foreign = (("hidden_size", replace(TARGET, hidden_size=48)),)

    @pytest.fixture
    def candidate(self, tmp_path: Path) -> Candidate:
        path = write_layer(tmp_path / "layer")
        return Candidate(EagleSpeculator, EagleOptions(model=str(path), drafts=3, candidates=5))


class TestEagleWithItsEmbedding(TestEagle):
    foreign = (("shape (64, 32)", replace(TARGET, vocab_size=100)),)

    @pytest.fixture
    def candidate(self, tmp_path: Path) -> Candidate:
        path = write_layer(tmp_path / "layer", embedding=TARGET.vocab_size, biases=True)
        return Candidate(EagleSpeculator, EagleOptions(model=str(path), drafts=1))


@pytest.mark.gpu
class TestEagleOnCuda(TestEagle):
    device = "cuda"


def opened(slot: int, prompt: Sequence[int]) -> SlotOpening:
    greedy = SamplingParams(temperature=0.0)
    return SlotOpening(slot=slot, sampling=greedy, seed=0, prompt=tuple(prompt), max_length=90)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("embedding", [None, TARGET.vocab_size], ids=["shared", "own"])
def test_published_files_give_the_drafts_of_the_definition(tmp_path: Path, biases: bool, embedding: int | None) -> None:
    """Greedy, over prompts in pieces, one whose prefix the target did not run, one of a single token, and steps that
    keep some of their drafts."""
    path = write_layer(tmp_path / "layer", biases=biases, embedding=embedding)
    need = SpeculatorSuite.need()
    made, target = EagleSpeculator(need, EagleOptions(model=str(path), drafts=3)), StandInTarget(need.target, "cpu")
    made.attach(target)
    definition = Definition(path, target)
    texts = {
        3: [(7 * i + 3) % 64 for i in range(40)],
        0: [9, 2, 9, 2, 33],
        2: [5],
        1: [(11 * i) % 64 for i in range(30)],
    }
    begins = {3: 0, 0: 0, 2: 0, 1: 16}
    states = {slot: [target.state(text[: i + 1]) for i in range(len(text))] for slot, text in texts.items()}
    made.open([opened(slot, text) for slot, text in texts.items()])
    for slot, text in texts.items():
        for start in range(begins[slot], len(text) - 1, 13):
            pieces = states[slot][start : min(start + 13, len(text) - 1)]
            made.observe_prompt(slot, start, torch.stack(pieces))
    slots = torch.tensor(list(texts))
    kept = [[1, 1, 1, 1], [4, 1, 2, 0], [2, 3, 1, 4]]
    seen = set()
    for counts in kept:
        ids = torch.full((4, 4), -1)
        hidden = torch.full((4, 4, need.target.hidden_size), float("nan"))
        for row, (slot, count) in enumerate(zip(texts, counts, strict=True)):
            text = texts[slot]
            for place in range(count):
                hidden[row, place] = states[slot][-1]
                ids[row, place] = (text[-1] * 5 + len(text)) % 64
                text.append(int(ids[row, place]))
                states[slot].append(target.state(text))
        made.observe(slots, ids, torch.tensor(counts))
        made.observe_hidden(slots, ids, torch.tensor(counts), hidden)
        context = DraftContext(
            slots=slots,
            last_ids=torch.tensor([text[-1] for text in texts.values()]),
            positions=torch.tensor([len(text) - 1 for text in texts.values()]),
            taps=(),
            batch=None,
            drafts=3,
        )
        expected = [
            definition.drafts(text, states[slot][begins[slot] : -1], begins[slot], 3) for slot, text in texts.items()
        ]
        assert made.propose(context).ids.tolist() == expected
        seen |= {tuple(row) for row in expected}
    assert len(seen) > 8


def test_a_slot_that_has_seen_nothing_proposes_nothing(tmp_path: Path) -> None:
    need = SpeculatorSuite.need()
    made = EagleSpeculator(need, EagleOptions(model=str(write_layer(tmp_path / "layer"))))
    made.attach(StandInTarget(need.target, "cpu"))
    made.open([opened(1, [4, 5])])
    one = torch.tensor([1])
    context = DraftContext(slots=one, last_ids=one, positions=one, taps=(), batch=None, drafts=2)
    assert made.propose(context).ids.tolist() == [[-1, -1]]


def refused(target: Path, *words: str, **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(target, device="cpu", max_length=90, speculator={"use": "eagle", "options": options}).close()
    for word in ("speculator", *words):
        assert word in str(caught.value)


def test_layers_that_do_not_fit(tiny_path: Path, tmp_path: Path) -> None:
    good = write_layer(tmp_path / "good", size=64)
    refused(tiny_path, "nowhere", model=str(tmp_path / "nowhere"))
    refused(tiny_path, "model: ")
    refused(tiny_path, "hidden_size is 48, that of the target 64", model=str(write_layer(tmp_path / "other", size=48)))
    embedding = write_layer(tmp_path / "embedding", size=64, embedding=100)
    refused(tiny_path, "embed_tokens.weight has shape (100, 64)", "(211, 64)", model=str(embedding))
    deep = write_layer(tmp_path / "deep", size=64, num_hidden_layers=2, hidden_act="gelu_pytorch_tanh")
    refused(tiny_path, "num_hidden_layers is 2", "hidden_act", model=str(deep))
    norm = write_layer(tmp_path / "norm", size=64, more={"layers.0.input_layernorm.weight": (64,)})
    refused(tiny_path, "no norm before attention", model=str(norm))
    wide = write_layer(tmp_path / "wide", size=64, intermediate_size=96)
    refused(tiny_path, "mlp.gate_proj.weight has shape (48, 64)", "(96, 64)", model=str(wide))
    lacks = write_layer(tmp_path / "lacks", size=64, rms_norm_eps=None, num_attention_heads=None)
    refused(tiny_path, "num_attention_heads", model=str(lacks))
    turned = write_layer(tmp_path / "turned", size=64, rope_scaling={"rope_type": "spiral"})
    refused(tiny_path, "spiral", model=str(turned))
    (good / "model.safetensors").rename(good / "pytorch_model.bin")
    refused(tiny_path, "pickle", model=str(good))


@pytest.mark.parametrize("own", [0.0, 1.0], ids=["the target's states", "its own states"])
def test_the_loss_is_that_of_state_and_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: float) -> None:
    """Of the paper's definition in float64: smooth L1 of the next state, and a tenth of the cross entropy between what
    the target's head makes of both. Where it gets its own states, all but the first of each text are."""
    monkeypatch.setattr(eagle_training, "_OWN", own)
    spec, generator = TARGET, torch.Generator().manual_seed(3)
    matrix = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
    embedding = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
    config = {"rms_norm_eps": EPS, "rope_theta": THETA, "intermediate_size": INNER}
    target = replace(spec, layers=(replace(spec.layers[0], query_heads=HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE),))
    trainer = EagleTrainer(
        HeadTraining(
            target=target, config=config, embedding=embedding, head=matrix, attention=attend_in_torch, drafts=3, seed=0
        )
    )
    for part in trainer.parameters:
        part.data += 0.3 * torch.randn(part.shape, generator=generator)
    save_file(
        {name: part.detach().contiguous() for name, part in trainer.weights().items()}, tmp_path / "model.safetensors"
    )
    definition = Definition(tmp_path, StandInTarget(spec, "cpu"))
    definition.embedding = embedding.double()
    texts, states, wanted = [], [], []
    for count in (6, 9):
        ids = torch.randint(spec.vocab_size, (count,), generator=generator)
        hidden = torch.randn(count - 1, spec.hidden_size, generator=generator)
        texts.append(HeadText(ids=ids, hidden=hidden, greedy=(hidden @ matrix.T).argmax(-1)))
        made = definition.states(ids[1:-1].tolist(), list(hidden[:-1]), 0)
        if own:
            made = definition.states(ids[1:-1].tolist(), [hidden[0], *made[:-1]], 0)
        states.append(made)
        wanted.append(hidden[1:].double())
    found, expected = torch.cat(states), torch.cat(wanted)
    off = (found - expected).abs()
    state = torch.where(off < 1, 0.5 * off**2, off - 0.5).mean()
    logits = [part @ matrix.double().T for part in (found, expected)]
    choice = -(logits[1].softmax(-1) * logits[0].log_softmax(-1)).sum(-1).mean()
    assert float(trainer.loss(texts).detach()) == pytest.approx(float(state + 0.1 * choice), rel=1e-4)
