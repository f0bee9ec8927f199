"""The fused sampler on a CUDA device: large vocabularies against the definition, in a CUDA graph, as a distribution."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed, SampleRows, SamplingParams, SlotOpening
from pegboard.devices import device_facts
from pegboard.errors import PegboardError
from pegboard.testing.oracles.sampling import chi_square_limit, choose
from pegboard_sampling.fused.sampler import FusedSampler
from pegboard_sampling.torch_sampler import TorchSampler

#: Every way to choose.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 64, "temperature": 2.5, "min_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 0.5, "min_p": 1e-4},
    {"min_p": 0.02},
    {"top_k": 1000, "top_p": 0.95},
    {"top_k": 40, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {3: 4.0, 9: -4.0}},
    {"top_p": 0.8, "presence_penalty": 1.5, "min_tokens": 9},
]
#: Those that count no tokens, which are chosen in another way when no others are beside them.
UNCOUNTED = [
    {"top_p": 0.05},
    {"top_p": 0.3, "temperature": 1.5},
    {"top_p": 0.5},
    {"top_p": 0.7, "min_p": 0.3},
    {"temperature": 0.7},
    *(kind for kind in KINDS if "top_k" not in kind),
]


def need(vocab: int, slots: int) -> SamplerNeed:
    return SamplerNeed(device=device_facts("cuda"), vocab_size=vocab, slots=slots, max_length=1000)


def opening(slot: int, seed: int | None = None, **kind: Any) -> SlotOpening:
    text = {"prompt": (3, 5, 5, 8), "output": (1, 1, 9, 5), "stop_ids": (0, 2)}
    sampling = SamplingParams(**kind)
    return SlotOpening(slot=slot, sampling=sampling, seed=slot if seed is None else seed, max_length=1000, **text)


def rows(slots: Sequence[int], position: int) -> SampleRows:
    return SampleRows(
        slots=torch.tensor(slots, device="cuda"),
        positions=torch.full((len(slots),), position, device="cuda"),
        host_slots=tuple(slots),
    )


def logits_of(form: str, count: int, vocab: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(vocab)
    x = torch.randn(count, vocab, generator=draw) * 3
    if form == "tied":
        x = x.round()
    elif form == "flat":
        x = torch.zeros_like(x)
    elif form == "one-hot":
        x = torch.zeros_like(x).scatter_(1, torch.randint(0, vocab, (count, 1), generator=draw), 30.0)
    elif form == "clustered":
        x[:, vocab // 3 : vocab // 3 + 200] += 30
    elif form == "masked":
        x = x.masked_fill(torch.rand(count, vocab, generator=draw) < 0.9, -math.inf)
        x[:, vocab // 2] = 1.0
    return x.to("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["normal", "tied", "flat", "one-hot", "clustered", "masked"])
@pytest.mark.parametrize("vocab", [17, 5000, 50257, 128256, 262144])
def test_choices_are_the_definition_s(form: str, vocab: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for kinds in (KINDS, UNCOUNTED):
            openings = [opening(slot, **kind) for slot, kind in enumerate(kinds)]
            sampler = FusedSampler.create(need(vocab, len(kinds)), None)
            sampler.open(openings)
            logits = logits_of(form, len(kinds), vocab, dtype)
            wide = torch.full((len(kinds), vocab + 40), math.nan, device="cuda", dtype=dtype)
            wide[:, 8 : 8 + vocab] = logits
            ids = sampler.sample(wide[:, 8 : 8 + vocab], rows(range(len(kinds)), 77)).ids.tolist()
            for row, id, one in zip(logits, ids, openings, strict=True):
                problem = choose(row, one, 77).problem(id, 1e-4)
                assert not problem, f"{dtype}, {one.sampling}: {problem}"


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["normal", "tied", "flat", "clustered", "masked"])
def test_tokens_are_the_torch_sampler_s(form: str) -> None:
    """256 rows that count no tokens, two of which fail; where the samplers differ the definition decides."""
    vocab, count = 128256, 256
    openings = [opening(slot, **UNCOUNTED[slot % len(UNCOUNTED)]) for slot in range(count)]
    sampler, other = FusedSampler.create(need(vocab, count), None), TorchSampler.create(need(vocab, count), None)
    logits = logits_of(form, count, vocab, torch.float32)
    logits[17, 77_000], logits[18] = math.nan, -math.inf
    for position in (3, 4):
        sampler.open(openings)
        other.open(openings)
        ids = sampler.sample(logits, rows(range(count), position)).ids.tolist()
        expected = other.sample(logits.clone(), rows(range(count), position)).ids.tolist()
        assert (ids[17], ids[18]) == (-1, -2)
        for row, (id, right) in enumerate(zip(ids, expected, strict=True)):
            if id != right:
                problem = choose(logits[row], openings[row], position).problem(id, 1e-4)
                assert not problem, f"{openings[row].sampling}: {problem}"


@pytest.mark.gpu
@pytest.mark.parametrize("counted", [True, False])
def test_replays_follow_slots_parameters_and_positions(counted: bool) -> None:
    """Rows of every kind, recorded once, with slots opened anew in between: as the same steps without a graph. The last
    row is idle."""
    kinds = KINDS if counted else UNCOUNTED
    modes = ("raw", "processed") if counted else ("raw", "raw")
    vocab, count = 128256, len(kinds)
    recorded, plain = (FusedSampler.create(need(vocab, count + 1), None) for _ in range(2))
    logits = torch.empty(count + 1, vocab, device="cuda")
    logits[count] = math.nan
    step = rows([*range(count), count], 0)
    graph = torch.cuda.CUDAGraph()
    out = None
    for turn in range(3):
        order = [(slot + turn) % count for slot in range(count)]
        openings = [
            opening(slot, seed=100 * turn + slot, logprobs=3, logprobs_mode=modes[slot % 2], **kind)
            for slot, kind in zip(order, kinds, strict=True)
        ]
        for sampler in (recorded, plain):
            sampler.open(openings)
        step = msgspec.structs.replace(step, host_slots=tuple(range(count)), key=recorded.graph_key(range(count)))
        if out is None:
            logits[:count] = logits_of("normal", count, vocab, torch.float32)
            recorded.sample(logits, step)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = recorded.sample(logits, step)
            recorded.open(openings)
        for position in range(4):
            logits[:count] = logits_of("normal", count, vocab, torch.float32).roll(1000 * position + turn, 1)
            step.slots[:count] = torch.tensor(order, device="cuda").roll(position)
            step.positions.fill_(position + turn)
            graph.replay()
            slots = step.slots[:count].tolist()
            expected = plain.sample(logits[:count], rows(slots, position + turn))
            assert out.ids[:count].tolist() == expected.ids.tolist()
            assert out.logprobs is not None
            assert expected.logprobs is not None
            assert torch.equal(out.logprobs.chosen[:count], expected.logprobs.chosen)
            assert torch.equal(out.logprobs.top_ids[:count], expected.logprobs.top_ids)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", [{}, {"top_k": 30, "top_p": 0.9}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 100}], ids=str
)
def test_distribution(kind: dict[str, Any]) -> None:
    """Chi-square at 99.99 % of 10^5 draws, 10^6 in full, from 150 tokens."""
    draws = 1_000_000 if os.environ.get("PEGBOARD_FULL") else 100_000
    vocab, count = 150, 1000
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    sampler = FusedSampler.create(need(vocab, count), None)
    sampler.open([opening(slot, seed=slot * 7919, **kind) for slot in range(count)])
    logits = row.cuda().expand(count, -1).contiguous()
    found = torch.zeros(vocab, dtype=torch.int64, device="cuda")
    for position in range(draws // count):
        found += torch.bincount(sampler.sample(logits, rows(range(count), position)).ids, minlength=vocab)
    expected = choose(row, opening(0, **kind), 0).probabilities * draws
    possible = expected > 0
    assert not found.cpu()[~possible].any()
    statistic = float(((found.cpu() - expected)[possible] ** 2 / expected[possible]).sum())
    assert statistic < chi_square_limit(int(possible.sum()) - 1)


def test_refusals() -> None:
    def refused(**changes: Any) -> str:
        fields: dict[str, Any] = {"device": DeviceFacts(type="cuda", capability=(9, 0)), "vocab_size": 9, "slots": 1}
        return " ".join(FusedSampler.refusals(SamplerNeed(**(fields | {"max_length": 9} | changes)), None))

    assert not refused(dtype="bfloat16")
    assert "capability 8.0" in refused(device=DeviceFacts(type="cuda", capability=(7, 5)))
    assert "capability 8.0" in refused(device=DeviceFacts(type="cpu"))
    assert "float64" in refused(dtype="float64")
    assert not refused(max_drafts=2)
    assert "at most 16777216" in refused(vocab_size=1 << 25)


def test_wrong_logits_and_slots_are_named() -> None:
    sampler = FusedSampler(
        SamplerNeed(device=DeviceFacts(type="cpu"), vocab_size=9, slots=2, max_length=9), interpreted=True
    )
    one = SampleRows(slots=torch.zeros(1, dtype=torch.int64), positions=torch.zeros(1), host_slots=(0,))
    with pytest.raises(PegboardError, match=r"logits are \(1, 8\), expected \[rows, 9\]"):
        sampler.sample(torch.zeros(1, 8), one)
    with pytest.raises(PegboardError, match=r"logits are torch.float64; the fused sampler takes float32"):
        sampler.sample(torch.zeros(1, 9, dtype=torch.float64), one)
    with pytest.raises(PegboardError, match=r"2 rows of logits, 1 slots"):
        sampler.sample(torch.zeros(2, 9), one)
    with pytest.raises(PegboardError, match=r"slot 2 does not exist; slots are 0 to 1"):
        sampler.open([opening(2)])
    with pytest.raises(PegboardError, match=r"slot 0: token id 9 is not in 0 .. 8"):
        sampler.open([opening(0, logit_bias={9: 1.0})])
