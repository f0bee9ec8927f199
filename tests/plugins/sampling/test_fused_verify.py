"""Drafts in the fused sampler: as the torch sampler verifies them, coupled and by rejection; on a CUDA device, and on a
CPU under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import pytest
import torch
from torch import Tensor

from pegboard import Part, Request, hookimpl
from pegboard.config import PartChoice
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed, SampleRows, SamplingParams, SlotOpening, VerifyOutput, VerifyRows
from pegboard.devices import device_facts
from pegboard.errors import PegboardError
from pegboard.registry.resolution import resolve
from pegboard.testing.engines import isolated_engine, isolated_registry
from pegboard.testing.oracles.sampling import chi_square_limit, choose
from pegboard_sampling.fused.sampler import FusedSampler
from pegboard_sampling.options import FusedSamplerOptions, TorchSamplerOptions
from pegboard_sampling.torch_sampler import TorchSampler

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Where kernels run in this process.
DEVICE = "cpu" if INTERPRETED else "cuda"
# numpy warns of infinities that a device computes and drops
here = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning") if INTERPRETED else pytest.mark.gpu
FULL = bool(os.environ.get("PEGBOARD_FULL"))
TRIALS = 10 if not INTERPRETED else 3 if FULL else 1
Verification = Literal["coupled", "rejection"]

PROMPT, STOPS = (3, 5, 5, 8), (1, 2)
#: Every way to choose, and all that drafts before a choice or after it matter to.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 5, "top_p": 0.9, "logprobs": 3},
    {"top_p": 0.8, "temperature": 1.4},
    {"min_p": 0.05},
    {"top_k": 70, "logprobs": 2, "logprobs_mode": "processed"},
    {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "temperature": 0.7},
    {"top_k": 20, "frequency_penalty": 1.2, "logit_bias": {3: 2.0, 9: -4.0}},
    {"top_p": 0.9, "presence_penalty": 2.0, "min_tokens": 5, "logprobs": 4, "logprobs_mode": "processed"},
    {"temperature": 0.0, "frequency_penalty": 2.0, "logprobs": 0},
    {"temperature": 0.5, "stops": tuple(range(0, 80, 3))},
    {"temperature": 0.6, "max_length": 13},
    {"temperature": 0.9, "min_tokens": 6, "stops": tuple(range(0, 80, 2))},
]
#: Which of them reduced counts verify in which way: each coupled, each by rejection.
HALF = {
    "coupled": range(0, 13, 2),
    "trees": range(1, 13, 2),
    "rejection": range(0, 13, 2),
    "rejection with probs": range(1, 13, 2),
    "rejection of trees": range(0, 13, 3),
}
#: Draws with which enough drafts are kept and refused in each of these ways.
HALF_SEED = 1307


def opening(slot: int, seed: int | None = None, **kind: Any) -> SlotOpening:
    facts = {"stop_ids": kind.pop("stops", STOPS), "max_length": kind.pop("max_length", 1000)}
    return SlotOpening(
        slot=slot,
        sampling=SamplingParams(**kind),
        seed=slot if seed is None else seed,
        prompt=PROMPT,
        output=(1, 9),
        **facts,
    )


def made(vocab: int, slots: int, drafts: int, verification: Verification) -> FusedSampler:
    facts = DeviceFacts(type="cpu") if INTERPRETED else device_facts("cuda")
    need = SamplerNeed(device=facts, vocab_size=vocab, slots=slots, max_length=1000, max_drafts=drafts)
    if INTERPRETED:
        return FusedSampler(need, rejects=verification == "rejection", interpreted=True)
    return FusedSampler.create(need, FusedSamplerOptions(verification=verification))


def reference(vocab: int, slots: int, drafts: int, verification: Verification) -> TorchSampler:
    facts = DeviceFacts(type="cpu")
    need = SamplerNeed(device=facts, vocab_size=vocab, slots=slots, max_length=1000, max_drafts=drafts)
    return TorchSampler.create(need, TorchSamplerOptions(verification=verification))


def verify_rows(
    slots: list[int],
    queries: list[list[int]],
    device: str,
    probs: Tensor | None = None,
    parents: list[list[int]] | None = None,
) -> VerifyRows:
    starts = [0, *itertools.accumulate(len(row) for row in queries)]
    return VerifyRows(
        slots=torch.tensor(slots, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        positions=torch.full((len(slots),), 10, device=device),
        ids=torch.tensor([id for row in queries for id in row], device=device),
        parents=None if parents is None else torch.tensor([one for row in parents for one in row], device=device),
        probs=None if probs is None else probs.to(device),
        host_slots=tuple(slots),
        host_queries=tuple(len(row) for row in queries),
    )


def likely_drafts(logits: Tensor, sizes: list[int], draw: torch.Generator) -> list[list[int]]:
    """A last token, then drafts: mostly the best ones, with the second best and tokens that come again in between."""
    rows, at = [], 0
    for size in sizes:
        row = [7]
        for j in range(size - 1):
            best = logits[at + j].topk(2).indices.tolist()
            row.append(best[int(torch.rand((), generator=draw) < 0.2)])
        at += size
        rows.append(row)
    return rows


def likely_trees(logits: Tensor, parents: list[list[int]]) -> list[list[int]]:
    """As `likely_drafts`: the best token behind each query, the second best for its second child, and so on."""
    rows, at = [], 0
    for own in parents:
        siblings = [own[:query].count(parent) for query, parent in enumerate(own)]
        rows.append([7, *(int(logits[at + own[q]].argsort(descending=True)[siblings[q]]) for q in range(1, len(own)))])
        at += len(own)
    return rows


def same(found: VerifyOutput, expected: VerifyOutput, asked: list[int | None]) -> None:
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.count.tolist() == expected.count.tolist()
    assert found.path.tolist() == expected.path.tolist()
    assert found.logprobs is not None
    assert expected.logprobs is not None
    ours, right = found.logprobs, expected.logprobs
    for row, top in enumerate(asked):
        for step in range(int(expected.count[row]) if top is not None else 0):
            assert float(ours.chosen[row, step]) == pytest.approx(float(right.chosen[row, step]), abs=1e-4)
            possible = right.top_values[row, step, :top] > -torch.inf
            ids = (each.top_ids[row, step, :top].cpu()[possible].tolist() for each in (ours, right))
            assert next(ids) == next(ids)


@here
@pytest.mark.parametrize(
    "verification", ["coupled", "rejection", "rejection with probs", "trees", "rejection of trees"]
)
@pytest.mark.parametrize("vocab", [80, 5000] if not INTERPRETED else [80])
def test_as_the_torch_sampler(verification: str, vocab: int) -> None:
    """Rows of all kinds side by side with 0 to 3 drafts, some of them none (-1), and how they go on afterwards."""
    way: Verification = "rejection" if "rejection" in verification else "coupled"
    kinds = KINDS if FULL or not INTERPRETED else [KINDS[i] for i in HALF[verification]]
    accepted = refused = 0
    for trial in range(TRIALS):
        draw = torch.Generator().manual_seed(100 * trial + (vocab if len(kinds) == len(KINDS) else HALF_SEED))
        fused, right = made(vocab, len(kinds), 3, way), reference(vocab, len(kinds), 3, way)
        openings = [opening(slot, seed=1000 * trial + slot, **kind) for slot, kind in enumerate(kinds)]
        for sampler in (fused, right):
            sampler.open(openings)
        sizes = torch.randint(1, 5, (len(kinds),), generator=draw).tolist()
        sizes[trial], sizes[trial + 1] = 1, 4
        logits = torch.randn(sum(sizes), vocab, generator=draw) * 4
        trees = None
        if "trees" in verification:
            trees = [[-1, *(int(torch.randint(query, (), generator=draw)) for query in range(1, n))] for n in sizes]
        queries = likely_drafts(logits, sizes, draw) if trees is None else likely_trees(logits, trees)
        queries[trial + 1][3] = -1
        probs = None
        if verification == "rejection with probs":
            probs = (logits.roll(1, 0) * 0.8 + torch.randn(logits.shape, generator=draw)).softmax(-1)
        order = torch.randperm(len(kinds), generator=draw).tolist()
        rows = verify_rows(order, queries, "cpu", probs, trees)
        expected = right.verify(logits, rows)
        found = fused.verify(logits.to(DEVICE), verify_rows(order, queries, DEVICE, probs, trees))
        same(found, expected, [openings[slot].sampling.logprobs for slot in order])
        accepted += int((expected.count - 1).sum())
        refused += int((expected.count < torch.tensor(sizes)).sum())
        after = torch.randn(len(kinds), vocab, generator=draw)
        ids = [
            sampler.sample(
                after.to(device),
                SampleRows(
                    slots=torch.arange(len(kinds), device=device),
                    positions=torch.full((len(kinds),), 30, device=device),
                    host_slots=tuple(range(len(kinds))),
                ),
            ).ids.tolist()
            for sampler, device in ((fused, DEVICE), (right, "cpu"))
        ]
        assert ids[0] == ids[1]
    assert accepted > 5 * TRIALS
    assert refused > 2 * TRIALS


@here
def test_broken_rows_and_idle_ones() -> None:
    """A NaN stands where it came up; an idle row, of a slot that nobody opened, and queries that are nobody's harm no
    other."""
    vocab = 40
    sampler, alone = made(vocab, 4, 2, "coupled"), made(vocab, 4, 2, "coupled")
    for each in (sampler, alone):
        each.open([opening(slot, temperature=0.0) for slot in range(3)])
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(3))
    best = logits.argmax(-1).tolist()
    logits[4] = torch.nan
    logits[7:] = torch.nan
    queries = [[7, best[0], 5], [7, best[3]], [7], [0]]
    rows = verify_rows([0, 1, 2, 3], queries, DEVICE)
    padded = torch.cat([rows.ids, rows.ids.new_full((2,), -1)])
    rows = msgspec.structs.replace(rows, ids=padded, host_slots=(0, 1, 2), host_queries=None)
    out = sampler.verify(logits.to(DEVICE), rows)
    assert out.count[:3].tolist() == [2, 2, 1]
    assert out.ids[:3].tolist() == [[best[0], best[1], -1], [best[3], -1, -1], [best[5], -1, -1]]
    only = alone.verify(logits[:6].to(DEVICE), verify_rows([0, 1, 2], queries[:3], DEVICE))
    assert torch.equal(out.ids[:3], only.ids)


@pytest.mark.gpu
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_replays_follow_drafts_slots_and_positions(verification: Verification) -> None:
    """Recorded once, then with other drafts, sizes, slots and parameters: as the same steps without a graph."""
    vocab, count, width = 20011, len(KINDS), 4
    recorded, plain = (made(vocab, count + 1, width - 1, verification) for _ in range(2))
    total = 3 * count
    logits = torch.zeros(total, vocab, device="cuda")
    rows = verify_rows(list(range(count)), [[7, 0, 0]] * count, "cuda")
    probs = torch.full((total, vocab), 1 / vocab, device="cuda") if verification == "rejection" else None
    rows = msgspec.structs.replace(rows, probs=probs, host_queries=None)
    graph, out = torch.cuda.CUDAGraph(), None
    for turn in range(3):
        openings = [opening((slot + turn) % count, seed=100 * turn + slot, **kind) for slot, kind in enumerate(KINDS)]
        for sampler in (recorded, plain):
            sampler.open(openings)
        if out is None:
            recorded.verify(logits, rows)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = recorded.verify(logits, rows)
            recorded.open(openings)
        for position in range(3):
            draw = torch.Generator().manual_seed(10 * turn + position)
            sizes = [1 + (slot + position) % width for slot in range(count)]
            sizes[-1] += total - sum(sizes) if 0 < sizes[-1] + total - sum(sizes) <= width else 0
            if sum(sizes) > total:
                sizes = [3] * count
            step = torch.randn(total, vocab, generator=draw) * 3
            queries = likely_drafts(step, sizes, draw)
            order = torch.randperm(count, generator=draw).tolist()
            now = verify_rows(order, queries, "cuda")
            logits.copy_(step)
            rows.slots.copy_(now.slots)
            rows.query_start.copy_(now.query_start)
            rows.positions.copy_(now.positions + position)
            rows.ids.fill_(-1)
            rows.ids[: now.ids.shape[0]] = now.ids
            graph.replay()
            expected = plain.verify(logits.clone(), rows)
            assert out.ids.tolist() == expected.ids.tolist()
            assert out.count.tolist() == expected.count.tolist()
            assert out.path.tolist() == expected.path.tolist()
            assert int((out.count > 1).sum()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kw", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("sure", [False, True], ids=["drawn", "sure"])
def test_rejection_keeps_the_distribution(kw: dict[str, Any], sure: bool) -> None:
    draws, vocab = 20_000, 12
    first = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -1.0, -2.0, -3.0, 1.2])
    second = first.flip(0) * 0.7
    draft = torch.tensor([0.3, 0.0, 0.1, 0.0, 0.3, 0.0, 0.0, 0.2, 0.0, 0.05, 0.05, 0.0])
    sampler = made(vocab, draws, 1, "rejection")
    sampler.open([opening(slot, seed=7919 * slot, stops=(), **kw) for slot in range(draws)])
    drafts = draft.multinomial(draws, replacement=True, generator=torch.Generator().manual_seed(5))
    if sure:
        drafts = torch.full_like(drafts, 2)
    queries = torch.stack((torch.full_like(drafts, 3), drafts), 1).tolist()
    rows = verify_rows(list(range(draws)), queries, "cuda")
    if not sure:
        rows = msgspec.structs.replace(rows, probs=draft.cuda().expand(2 * draws, -1))
    out = sampler.verify(torch.stack((first, second)).repeat(draws, 1).cuda(), rows)
    ids, both = out.ids.cpu(), (out.count == 2).cpu()
    for logits, found in ((first, ids[:, 0]), (second, ids[both, 1])):
        p = choose(logits, opening(0, **kw), 0).probabilities
        counts, wanted = found.bincount(minlength=vocab).double(), p * found.shape[0]
        assert not counts[p == 0].any()
        often = wanted >= 5  # chi-square is one where each kind is expected some times; the others count as one
        counts, wanted = (torch.cat([each[often], each[~often].sum()[None]]) for each in (counts, wanted))
        statistic = float(((counts - wanted) ** 2 / wanted.clamp(min=1)).sum())
        assert statistic < chi_square_limit(int(often.sum()))
    p = choose(first, opening(0, **kw), 0).probabilities
    overlap = float(p[2]) if sure else float(torch.minimum(p, draft.double()).sum())
    assert float(both.double().mean()) == pytest.approx(overlap, abs=0.02)


class Interpreted(FusedSampler):
    """On a CPU, in an engine."""

    @classmethod
    def refusals(cls, need: SamplerNeed, options: Any) -> Sequence[str]:
        return ()

    @classmethod
    def create(cls, need: SamplerNeed, options: Any) -> Self:
        return cls(need, rejects=cls.wants_probs(options), interpreted=True)


class Offer:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        options = "pegboard_sampling.options:FusedSamplerOptions"
        return [Part(role="sampler", name="interpreted", factory=Interpreted, options=options, summary="On a CPU")]


@pytest.mark.skipif(not INTERPRETED, reason="on a CUDA device: tests/gpu/test_speculation.py")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_through_an_engine(tiny_path: Path) -> None:
    """Coupled: the tokens of the torch sampler without drafts, and some drafts are kept."""
    asked = [
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.4, seed=4, top_k=4, frequency_penalty=0.3, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2, max_tokens=4, ignore_eos=True),
    ]
    speculator = {"use": "draft_model", "options": {"model": str(tiny_path), "drafts": 3}}
    found = []
    for settings in ({"sampler": "torch"}, {"sampler": "interpreted", "speculator": speculator, "adapt_drafts": False}):
        with isolated_engine(tiny_path, plugins=[Offer()], max_rows=4, dtype="float32", **settings) as engine:
            requests = [Request(prompt=[5, 6, 7, 5, 6, 7, 5], sampling=each) for each in asked]
            found.append([output.raise_for_error().token_ids for output in engine.generate(requests)])
            speculation = engine.stats().speculation
    assert found[0] == found[1]
    assert speculation is not None
    assert sum(speculation.accepted) > 0


@pytest.mark.skipif(INTERPRETED, reason="nothing runs")
def test_is_chosen_for_drafts_on_cuda() -> None:
    """By itself, as without drafts; where logits are float64 the torch sampler is."""
    device = DeviceFacts(type="cuda", index=0, capability=(9, 0))
    for dtype, right in (("bfloat16", "fused"), ("float64", "torch")):
        need = SamplerNeed(device=device, vocab_size=1000, slots=4, max_length=99, max_drafts=3, dtype=dtype)
        settings = {"device_type": "cuda", "objective": "throughput", "allow": ()}
        assert resolve(isolated_registry(), "sampler", PartChoice(), need, **settings).winner == right  # type: ignore[arg-type]


def test_what_does_not_fit_is_named() -> None:
    need = SamplerNeed(device=DeviceFacts(type="cpu"), vocab_size=9, slots=2, max_length=9, max_drafts=1)
    coupled, rejecting = (FusedSampler(need, rejects=rejects, interpreted=True) for rejects in (False, True))
    rows = verify_rows([0], [[1, 2]], "cpu")
    changed = msgspec.structs.replace
    cases = [
        (rejecting, 2, changed(rows, parents=torch.tensor([-1, 0]), probs=torch.zeros(2, 9)), "exclude each other"),
        (coupled, 2, changed(rows, probs=torch.ones(2, 9)), "takes no draft distributions"),
        (rejecting, 2, changed(rows, probs=torch.ones(2, 8)), r"probs are \(2, 8\), logits \(2, 9\)"),
        (coupled, 3, rows, "3 rows of logits for 2 queries"),
        (coupled, 2, changed(rows, query_start=torch.zeros(3, dtype=torch.int32)), "1 slots, 3 query starts"),
        (coupled, 3, verify_rows([0], [[1, 2, 3]], "cpu"), "a row has 3 queries; with max_drafts 1 it is 2"),
    ]
    for sampler, count, wrong, words in cases:
        with pytest.raises(PegboardError, match=words):
            sampler.verify(torch.zeros(count, 9), wrong)


def test_probs_are_wanted_by_rejection_alone() -> None:
    assert not FusedSampler.wants_probs(None)
    assert not FusedSampler.wants_probs(FusedSamplerOptions())
    assert FusedSampler.wants_probs(FusedSamplerOptions(verification="rejection"))


@pytest.mark.supports("Sampling", "drafts verified in Triton, coupled and by rejection (part fused)")
@pytest.mark.skipif(INTERPRETED, reason="runs in itself")
@pytest.mark.long
def test_under_the_interpreter(run_interpreted: Callable[[Path], str]) -> None:
    run_interpreted(Path(__file__))
