"""Medusa heads: published files, the definition in float64, the suite of every speculator, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from pegboard_sampling.speculation.choosing_loss import candidates, choice_loss
from pegboard_sampling.speculation.medusa import MedusaSpeculator
from pegboard_sampling.speculation.medusa_training import MedusaTrainer
from pegboard_sampling.speculation.options import MedusaOptions


def write_heads(
    path: Path,
    *,
    heads: int = 3,
    blocks: int = 1,
    size: int = TARGET.hidden_size,
    vocabulary: int | None = None,
    prefix: str = "",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **others: Any,
) -> Path:
    """As they are published; with `vocabulary` every head has an output matrix of its own."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        for block in range(blocks):
            at = f"{prefix}{head}.{block}.linear"
            tensors[f"{at}.weight"] = torch.randn(size, size, generator=generator) * 0.3
            tensors[f"{at}.bias"] = torch.randn(size, generator=generator)
        if vocabulary is not None:
            tensors[f"{prefix}{head}.{blocks}.weight"] = torch.randn(vocabulary, size, generator=generator)
    path.mkdir(parents=True)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "x", **others}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def defined(tensors: Mapping[str, Tensor], head: int, state: Tensor, matrix: Tensor, blocks: int) -> Tensor:
    """Logits [V] of one head for one state in float64, from the paper's definition."""
    x = state.double()
    for block in range(blocks):
        weight, bias = (tensors[f"{head}.{block}.linear.{part}"].double() for part in ("weight", "bias"))
        y = weight @ x + bias
        x = x + y / (1 + torch.exp(-y))
    own = tensors.get(f"{head}.{blocks}.weight")
    return (matrix if own is None else own).double() @ x


class TestMedusa(SpeculatorSuite):
    part = MedusaSpeculator
    claims = ("probs",)
    foreign = (("shape (32, 32)", replace(TARGET, hidden_size=48)),)

    @pytest.fixture
    def candidate(self, tmp_path: Path) -> Candidate:
        return Candidate(MedusaSpeculator, MedusaOptions(model=str(write_heads(tmp_path / "heads")), candidates=5))


class TestMedusaWithOutputs(TestMedusa):
    foreign = (("shape (64, 32)", replace(TARGET, vocab_size=100)),)

    @pytest.fixture
    def candidate(self, tmp_path: Path) -> Candidate:
        path = write_heads(tmp_path / "heads", heads=4, blocks=2, vocabulary=TARGET.vocab_size)
        return Candidate(MedusaSpeculator, MedusaOptions(model=str(path), drafts=2))


#: In no order; as drafts they are (0) (2) (0 0) (0 1) (2 0) (0 1 3).
PATHS = ((2,), (0, 1), (0,), (0, 1, 3), (2, 0), (0, 0))


class TestMedusaTrees(TestMedusa):
    claims = ()

    @pytest.fixture
    def candidate(self, tmp_path: Path) -> Candidate:
        path = write_heads(tmp_path / "heads")
        return Candidate(MedusaSpeculator, MedusaOptions(model=str(path), choices=PATHS, candidates=5))


@pytest.mark.gpu
class TestMedusaOnCuda(TestMedusa):
    device = "cuda"


@pytest.mark.gpu
class TestMedusaTreesOnCuda(TestMedusaTrees):
    device = "cuda"


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("vocabulary", [None, TARGET.vocab_size], ids=["shared", "own"])
def test_published_files_give_the_drafts_of_the_definition(
    tmp_path: Path, prefix: str, blocks: int, vocabulary: int | None
) -> None:
    """Greedy: draft i is the first choice of head i for the state that the last token was chosen from."""
    path = write_heads(tmp_path / "heads", blocks=blocks, vocabulary=vocabulary, prefix=prefix)
    need = SpeculatorSuite.need()
    made = MedusaSpeculator(need, MedusaOptions(model=str(path)))
    target = StandInTarget(need.target, "cpu")
    made.attach(target)
    texts = {slot: [slot + 3, 9, 2 * slot] for slot in range(4)}
    greedy = SamplingParams(temperature=0.0)
    made.open(
        [SlotOpening(slot=slot, sampling=greedy, seed=0, prompt=tuple(t), max_length=90) for slot, t in texts.items()]
    )
    slots, ids = torch.arange(4), torch.full((4, 4), -1)
    ids[:, :2] = 7
    count, hidden = torch.tensor([1, 2, 1, 2]), torch.full((4, 4, need.target.hidden_size), float("nan"))
    states = [target.state(text) for text in texts.values()]
    for row, state in enumerate(states):
        hidden[row, count[row] - 1] = state
    made.observe(slots, ids, count)
    made.observe_hidden(slots, ids, count, hidden)
    context = DraftContext(slots=slots, last_ids=ids[:, 0], positions=slots + 3, taps=(), batch=None, drafts=3)
    stored = load_file(path / "medusa_lm_head.safetensors")
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    expected = [[int(defined(tensors, h, s, target.matrix, blocks).argmax()) for h in range(3)] for s in states]
    assert made.propose(context).ids.tolist() == expected
    assert len({tuple(row) for row in expected}) == 4


def test_a_tree_has_the_heads_best_choices(tmp_path: Path) -> None:
    path = write_heads(tmp_path / "heads")
    need = SpeculatorSuite.need()
    made = MedusaSpeculator(need, MedusaOptions(model=str(path), choices=PATHS))
    described = MedusaSpeculator.describe(need, MedusaOptions(model=str(path), choices=PATHS))
    assert (described.drafts, described.depth) == (6, 3)
    target = StandInTarget(need.target, "cpu")
    made.attach(target)
    greedy = SamplingParams(temperature=0.0)
    made.open([SlotOpening(slot=1, sampling=greedy, seed=0, prompt=(4, 9), max_length=90)])
    state, slots = target.state([4, 9]), torch.tensor([1])
    made.observe_hidden(slots, torch.tensor([[7]]), torch.tensor([1]), state.view(1, 1, -1))
    stored = load_file(path / "medusa_lm_head.safetensors")
    best = [defined(stored, head, state, target.matrix, 1).topk(4).indices.tolist() for head in range(3)]
    expected = [best[0][0], best[0][2], best[1][0], best[1][1], best[1][0], best[2][3]]
    for drafts in range(1, 7):
        context = DraftContext(slots=slots, last_ids=slots, positions=slots, taps=(), batch=None, drafts=drafts)
        found = made.propose(context)
        assert found.ids.tolist() == [expected[:drafts]]
        assert found.parents is not None
        assert found.parents.tolist() == [[0, 0, 1, 1, 2, 4][:drafts]]


def test_trees_that_are_none_are_refused(tiny_path: Path, tmp_path: Path) -> None:
    path = str(write_heads(tmp_path / "heads", size=64))
    refused(tiny_path, "[1, 0]", "[1]", model=path, choices=[[0], [1, 0]])
    refused(tiny_path, "path twice", model=path, choices=[[0], [0]])
    refused(tiny_path, "empty", model=path, choices=[[0], []])
    refused(tiny_path, "0 to candidates - 1, 4", model=path, choices=[[5]], candidates=5)
    refused(tiny_path, "exclude each other", model=path, choices=[[0]], drafts=1)
    refused(tiny_path, "3 heads, choices has a path of 4", model=path, choices=[[0] * n for n in range(1, 5)])


def test_a_row_that_had_ended_keeps_its_state(tmp_path: Path) -> None:
    need = SpeculatorSuite.need()
    made = MedusaSpeculator(need, MedusaOptions(model=str(write_heads(tmp_path / "heads"))))
    target = StandInTarget(need.target, "cpu")
    made.attach(target)
    slots, nothing = torch.tensor([2]), torch.tensor([[-1, -1]])
    made.observe_hidden(slots, torch.tensor([[4, -1]]), torch.tensor([1]), torch.ones(1, 2, 32))
    context = DraftContext(slots=slots, last_ids=slots, positions=slots, taps=(), batch=None, drafts=2)
    before = made.propose(context).ids
    assert (before >= 0).all()
    made.observe_hidden(slots, nothing, torch.tensor([0]), torch.zeros(1, 2, 32))
    assert made.propose(context).ids.equal(before)


def refused(target: Path, *words: str, **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(target, device="cpu", max_length=90, speculator={"use": "medusa", "options": options}).close()
    for word in ("speculator", *words):
        assert word in str(caught.value)


def test_heads_that_do_not_fit(tiny_path: Path, tmp_path: Path) -> None:
    good = write_heads(tmp_path / "good", size=64)
    refused(tiny_path, "3 heads, drafts = 4", model=str(good), drafts=4)
    refused(tiny_path, "nowhere", model=str(tmp_path / "nowhere"))
    refused(tiny_path, "model: ")
    other = write_heads(tmp_path / "other", size=48)
    refused(tiny_path, "0.0.linear.weight has shape (48, 48)", "(64, 64)", "2.0.linear.bias", model=str(other))
    short = write_heads(tmp_path / "short", size=64, vocabulary=100)
    refused(tiny_path, "0.1.weight has shape (100, 64)", "(211, 64)", model=str(short))
    more = write_heads(tmp_path / "more", size=64, medusa_num_heads=4)
    refused(tiny_path, "missing tensor 3.0.linear.weight", model=str(more))
    for number, wrong in enumerate([0, "3", None, True]):
        path = write_heads(tmp_path / f"wrong{number}", size=64, medusa_num_layers=wrong)
        refused(tiny_path, f"medusa_num_layers is {wrong!r}", model=str(path))
    whole = write_heads(tmp_path / "integers", size=64, dtype=torch.int32)
    refused(tiny_path, "stored as int32", model=str(whole))
    (good / "medusa_lm_head.safetensors").rename(good / "medusa_lm_head.pt")
    refused(tiny_path, "pickle", model=str(good))
    refused(tiny_path, "is no folder", model=str(good / "config.json"))


def test_the_loss_is_the_weighted_cross_entropy_of_all_heads() -> None:
    """Head i learns what the target chooses i + 1 places further on."""
    spec, generator = TARGET, torch.Generator().manual_seed(3)
    matrix = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
    training = HeadTraining(
        target=spec, config={}, embedding=matrix, head=matrix, attention=attend_in_torch, drafts=3, seed=0
    )
    trainer = MedusaTrainer(training)
    for part in trainer.parameters:
        part.data.normal_(generator=generator)
    texts = []
    for count in (5, 9):
        hidden = torch.randn(count - 1, spec.hidden_size, generator=generator)
        texts.append(HeadText(ids=torch.arange(count), hidden=hidden, greedy=(hidden @ matrix.T).argmax(-1)))
    tensors, expected = {name: part.detach() for name, part in trainer.weights().items()}, 0.0
    for head in range(3):
        found = [
            -defined(tensors, head, state, matrix, 1).log_softmax(0)[text.greedy[place + 1 + head]]
            for text in texts
            for place, state in enumerate(text.hidden[: -1 - head])
        ]
        expected += 0.8**head * float(torch.stack(found).mean())
    assert float(trainer.loss(texts).detach()) == pytest.approx(expected, rel=1e-4)


def test_a_large_vocabulary_is_sampled() -> None:
    """The expected ones are always among the candidates, and are told apart from all the others."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.tensor([49151, 0, 7, 7])
    among = candidates(expected, 49152, generator)
    assert set(expected.tolist()) <= set(among.tolist())
    assert among.equal(among.unique())
    assert 1500 < len(among) < 2100
    assert not among.equal(candidates(expected, 49152, generator))
    matrix, states = torch.randn(len(among), 8, generator=generator), torch.randn(4, 8, generator=generator)
    logits = states.double() @ matrix.double().T
    places = [among.tolist().index(id) for id in expected.tolist()]
    wanted = -torch.stack([row.log_softmax(0)[place] for row, place in zip(logits, places, strict=True)]).mean()
    assert float(choice_loss(states, expected, matrix, among)) == pytest.approx(float(wanted), rel=1e-5)
    assert candidates(expected, 300, generator).equal(torch.arange(300))
