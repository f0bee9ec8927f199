"""TorchSampler against the definitions, written out token by token in plain float64 Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed, SampleRows, SamplingParams, SlotOpening, VerifyRows
from pegboard.errors import PegboardError
from pegboard.noise import child_seed, philox_words
from pegboard_sampling import choice
from pegboard_sampling.torch_sampler import TorchSampler

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = ["cpu", CUDA]
PROMPT = (3, 5, 5, 8)


def opening(
    slot: int, seed: int = 0, *, stop_ids: tuple[int, ...] = (), max_length: int = 1000, **kw: object
) -> SlotOpening:
    prompt = kw.pop("prompt", ())
    output = kw.pop("output", ())
    return SlotOpening(
        slot=slot,
        sampling=SamplingParams(**kw),  # type: ignore[arg-type]
        seed=seed,
        prompt=prompt,  # type: ignore[arg-type]
        output=output,  # type: ignore[arg-type]
        stop_ids=stop_ids,
        max_length=max_length,
    )


def make(openings: Sequence[SlotOpening], vocab: int, *, drafts: int = 0, device: str = "cpu") -> TorchSampler:
    need = SamplerNeed(
        device=DeviceFacts(type=device),
        vocab_size=vocab,
        slots=max(o.slot for o in openings) + 1,
        max_length=1000,
        max_drafts=drafts,
    )
    assert not TorchSampler.refusals(need, None)
    sampler = TorchSampler.create(need, None)
    sampler.open(openings)
    return sampler


def rows_of(slots: Sequence[int], positions: Sequence[int], device: str = "cpu") -> SampleRows:
    return SampleRows(
        slots=torch.tensor(slots, device=device),
        positions=torch.tensor(positions, device=device),
        host_slots=tuple(slots),
    )


# ---- the definitions, one row at a time


def gumbel_of(seed: int, position: int, token: int) -> float:
    counter = (token, position & 0xFFFFFFFF, position >> 32, 0)
    word = philox_words(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))[0]
    return -math.log(-math.log1p(-(word + 0.5) * 2.0**-32))


def adjusted(logits: Sequence[float], o: SlotOpening) -> list[float]:
    p, out = o.sampling, list(logits)
    for token in range(len(out)):
        if token in o.prompt or token in o.output:
            out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        if token in o.output:
            out[token] -= p.presence_penalty + p.frequency_penalty * o.output.count(token)
        out[token] += p.logit_bias.get(token, 0.0)
        if len(o.output) < p.min_tokens and token in o.stop_ids:
            out[token] = -math.inf
    return out


def distribution(logits: Sequence[float], o: SlotOpening) -> dict[int, float]:
    """Probabilities of what may be chosen."""
    p, z = o.sampling, adjusted(logits, o)
    peak = max(z)
    if p.temperature == 0 or p.top_k == 1 or p.top_p == 0:
        return {z.index(peak): 1.0}
    order = sorted((t for t in range(len(z)) if z[t] > -math.inf), key=lambda t: (-z[t], t))
    if p.top_k:
        order = order[: p.top_k]
    weights = {t: math.exp((z[t] - peak) / p.temperature) for t in order}
    if p.top_p < 1:
        total, mass, kept = math.fsum(weights.values()), 0.0, {}
        for t in order:
            if mass >= p.top_p * total:
                break
            kept[t] = weights[t]
            mass += weights[t]
        weights = kept
    weights = {t: w for t, w in weights.items() if w >= p.min_p}
    total = math.fsum(weights.values())
    return {t: w / total for t, w in weights.items()}


def chosen_by_definition(logits: Sequence[float], o: SlotOpening, position: int) -> int:
    allowed = distribution(logits, o)
    return max(sorted(allowed), key=lambda t: math.log(allowed[t]) + gumbel_of(o.seed, position, t))


PARAMS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_p": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 10_000},
    {"temperature": 0.8, "repetition_penalty": 1.5, "prompt": PROMPT, "output": (1, 1, 9)},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "prompt": PROMPT, "output": (1, 1, 9, 5)},
    {"temperature": 0.0, "frequency_penalty": -0.9, "output": (30, 30, 31)},
    {"temperature": 1.0, "logit_bias": {7: 4.0, 11: -100.0}},
    {"temperature": 0.0, "logit_bias": {13: 50.0}},
    {"temperature": 1.0, "min_tokens": 2, "output": (4,), "stop_ids": (0, 2, 33)},
    {"temperature": 1.0, "min_tokens": 1, "output": (4,), "stop_ids": (0,)},
    {
        "temperature": 0.6,
        "top_k": 8,
        "top_p": 0.9,
        "repetition_penalty": 0.8,
        "logit_bias": {1: 2.0},
        "prompt": PROMPT,
        "output": (6,),
    },
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_row_chooses_what_the_definition_chooses(dtype: torch.dtype, device: str) -> None:
    """Mixed rows, many positions and seeds; float64 logits to the token."""
    vocab, generator = 61, torch.Generator().manual_seed(3)
    openings = [opening(i, seed=(i * 0x9E3779B97F4A7C15) % (1 << 64), **kw) for i, kw in enumerate(PARAMS)]
    for position in range(40):
        sampler = make(openings, vocab, device=device)
        logits = (torch.randn(len(openings), vocab, generator=generator, dtype=torch.float64) * 2).to(dtype).to(device)
        before = logits.clone()
        out = sampler.sample(logits, rows_of(range(len(openings)), [position] * len(openings), device))
        assert torch.equal(logits, before)
        expected = [chosen_by_definition(row, o, position) for row, o in zip(logits.tolist(), openings, strict=True)]
        assert out.ids.tolist() == expected
        assert out.logprobs is None


@pytest.mark.parametrize("device", DEVICES)
def test_large_vocabularies_and_flat_rows(device: str) -> None:
    """The pruned and progressive paths: a nucleus wider than the first look, noise among thousands."""
    vocab, generator = 5003, torch.Generator().manual_seed(5)
    openings = [
        opening(0, seed=1, temperature=1.0),
        opening(1, seed=2, temperature=1.0, top_p=0.9),
        opening(2, seed=3, temperature=0.3, top_p=0.99),
        opening(3, seed=4, temperature=0.1, min_p=0.001),
        opening(4, seed=5, temperature=1.0, top_k=700),
    ]
    sampler = make(openings, vocab, device=device)
    for scale in (0.0, 0.5, 8.0):
        for position in range(4):
            logits = torch.randn(5, vocab, generator=generator, dtype=torch.float64) * scale
            out = sampler.sample(logits.to(device), rows_of(range(5), [position] * 5, device))
            assert out.ids.tolist() == [
                chosen_by_definition(row, o, position) for row, o in zip(logits.tolist(), openings, strict=True)
            ]


def test_the_dense_path_chooses_what_the_pruned_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choice.BLOCK_ELEMENTS, "cpu", 700)
    generator = torch.Generator().manual_seed(6)
    scale = torch.tensor([[0.1], [1], [3], [9], [30], [0]])
    logits = torch.randn(6, 2000, generator=generator, dtype=torch.float64) * scale
    zero = torch.zeros(6, 1, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for min_p in (0.0, 0.02, 1.0):
            for position in range(5):
                z = logits.to(dtype)
                draw = choice.Draw(
                    peak=z.amax(-1, keepdim=True).double(),
                    temperature=zero + 0.8,
                    top_p=zero + 1,
                    min_p=zero + min_p,
                    seeds=torch.arange(6),
                    positions=torch.full((6,), position),
                )
                expected = choice.all_candidates(z, draw).pick(draw).tolist()
                for share in (0.0, 2.0):
                    monkeypatch.setattr(choice, "SPARSE", share)
                    assert choice.pick_from_all(z, draw).tolist() == expected


# ---- distributions


def support(logits: Sequence[float], draws: int, **kw: object) -> dict[int, int]:
    """How often each token is chosen over 100 seeds and as many positions as it takes."""
    openings = [opening(slot, seed=child_seed(77, slot), **kw) for slot in range(100)]
    sampler = make(openings, len(logits))
    rows = torch.tensor(logits, dtype=torch.float64).expand(100, -1)
    counts: dict[int, int] = {}
    for position in range(draws // 100):
        sampler.open(openings)  # forgets the output
        for token in sampler.sample(rows, rows_of(range(100), [position] * 100)).ids.tolist():
            counts[token] = counts.get(token, 0) + 1
    return counts


@pytest.mark.parametrize(
    "kw",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 2.0, "prompt": PROMPT},
        {"temperature": 1.0, "logit_bias": {9: 3.0}},
    ],
    ids=str,
)
def test_chi_square_against_the_definition(kw: dict[str, object]) -> None:
    logits = [2.0, 1.5, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0]
    draws = 20_000
    expected = distribution(logits, opening(0, **kw))
    counts = support(logits, draws, **kw)
    assert set(counts) <= set(expected)
    statistic = sum((counts.get(t, 0) - draws * p) ** 2 / (draws * p) for t, p in expected.items())
    freedom = len(expected) - 1
    # Wilson-Hilferty, 99.9 %
    limit = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize(
    ("logits", "kw", "allowed"),
    [
        ([1.0, 3.0, 3.0, 3.0, 0.0], {"top_k": 2}, {1, 2}),
        ([1.0, 3.0, 2.0, 2.0, 2.0], {"top_k": 3}, {1, 2, 3}),
        ([0.0] * 8, {"top_k": 3}, {0, 1, 2}),
        ([0.0] * 8, {"top_p": 0.5}, {0, 1, 2, 3}),
        ([0.0] * 8, {"top_p": 0.51}, {0, 1, 2, 3, 4}),
        ([0.0] * 8, {"top_k": 4, "top_p": 0.5}, {0, 1}),
        ([0.0] * 8, {"min_p": 1.0}, set(range(8))),
        ([5.0, 0.0, 5.0], {"min_p": 1.0}, {0, 2}),
        ([0.0, -math.inf, 0.0, -math.inf], {}, {0, 2}),
        ([0.0, -math.inf, 0.0, -math.inf], {"top_k": 3}, {0, 2}),
        ([0.0, -math.inf, 0.0, -math.inf], {"top_p": 0.999}, {0, 2}),
        ([-math.inf, -math.inf, -50.0], {"top_k": 2, "top_p": 0.1}, {2}),
        ([0.0, 1e30, 0.0], {}, {1}),
        ([0.0, math.inf, 0.0, math.inf], {}, {1, 3}),
        ([0.0, math.inf, 0.0, math.inf], {"top_k": 3}, {1, 3}),
        ([0.0, math.inf, 0.0, math.inf], {"temperature": 0.0}, {1}),
        ([2.0, 2.0, 1.0], {"temperature": 0.0}, {0}),
        ([2.0, 2.0, 1.0], {"top_p": 0.0}, {0}),
        ([2.0, 2.0, 1.0], {"top_p": 1e-9}, {0}),
    ],
)
def test_exact_support(logits: list[float], kw: dict[str, object], allowed: set[int]) -> None:
    assert set(support(logits, 500, **{"temperature": 1.0, **kw})) == allowed


@pytest.mark.parametrize("kw", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("extra", [{}, {"frequency_penalty": 0.5}, {"logprobs": 2}], ids=str)
def test_a_broken_row_fails_alone(kw: dict[str, object], extra: dict[str, object]) -> None:
    openings = [opening(i, seed=i, **kw, **extra) for i in range(3)]
    good = [0.3, 1.0, -2.0, 0.9]
    for broken in ([math.nan, 0.0, 1.0, 2.0], [0.0, 9.0, math.nan, 2.0], [-math.inf] * 4):
        sampler = make(openings, 4)
        ids = sampler.sample(torch.tensor([good, broken, good]), rows_of([0, 1, 2], [4, 4, 4])).ids.tolist()
        assert ids[1] == (-2 if broken[0] == -math.inf else -1)
        assert ids[0] == chosen_by_definition(good, openings[0], 4)
        assert ids[2] == chosen_by_definition(good, openings[2], 4)


def test_nan_counts_even_where_it_is_masked() -> None:
    sampler = make([opening(0, temperature=0.0, min_tokens=5, stop_ids=(1,))], 3)
    assert sampler.sample(torch.tensor([[0.0, math.nan, 1.0]]), rows_of([0], [0])).ids.tolist() == [-1]


def test_masking_everything_leaves_nothing() -> None:
    sampler = make([opening(0, min_tokens=1, stop_ids=(0, 1, 2), prompt=())], 3)
    assert sampler.sample(torch.zeros(1, 3), rows_of([0], [0])).ids.tolist() == [-2]


# ---- independence and state


def test_alone_and_beside_others() -> None:
    vocab, generator = 700, torch.Generator().manual_seed(9)
    openings = [opening(i, seed=100 + i, **kw) for i, kw in enumerate(PARAMS)]
    logits = torch.randn(len(openings), vocab, generator=generator) * 2
    order = torch.randperm(len(openings), generator=generator).tolist()
    together = make(openings, vocab).sample(logits[order], rows_of(order, order)).ids.tolist()
    for place, slot in enumerate(order):
        alone = make([openings[slot]], vocab).sample(logits[slot : slot + 1], rows_of([slot], [slot]))
        assert alone.ids.tolist() == [together[place]]


def test_strided_logits() -> None:
    openings = [opening(i, seed=i, temperature=1.0, top_k=k) for i, k in enumerate((0, 5))]
    wide = torch.randn(4, 90, generator=torch.Generator().manual_seed(1))
    rows = rows_of([0, 1], [3, 3])
    strided = make(openings, 40).sample(wide[::2, 10:50], rows).ids
    assert torch.equal(strided, make(openings, 40).sample(wide[::2, 10:50].contiguous(), rows).ids)


def test_counts_advance_as_if_the_slot_were_opened_anew() -> None:
    """Ten steps in one life equal ten openings with the output so far."""
    kw: dict[str, object] = {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "min_tokens": 4,
        "stop_ids": (2, 3),
    }
    generator = torch.Generator().manual_seed(2)
    sampler = make([opening(1, seed=5, **kw), opening(0, seed=6, temperature=0.0)], 12)
    output: tuple[int, ...] = ()
    for step in range(10):
        logits = torch.randn(2, 12, generator=generator, dtype=torch.float64)
        id = int(sampler.sample(logits, rows_of([0, 1], [step, step])).ids[1])
        assert id == chosen_by_definition(logits[1].tolist(), opening(1, seed=5, output=output, **kw), step)
        output += (id,)
    assert set(output[:4]).isdisjoint({2, 3})


def test_reopening_forgets_and_pool_rows_are_shared_out_again() -> None:
    logits = torch.zeros(1, 12)
    sampler = make([opening(i, frequency_penalty=5.0, temperature=0.0, prompt=()) for i in range(4)], 12)
    for _ in range(3):
        for slot in range(4):
            sampler.sample(logits, rows_of([slot], [0]))
        sampler.open([opening(slot, temperature=0.0, prompt=()) for slot in (1, 2)])
        sampler.open([opening(slot, logit_bias={7: 1.0}, temperature=0.0, prompt=()) for slot in (2, 3)])
        assert sampler.sample(logits, rows_of([1], [0])).ids.tolist() == [0]
        for slot in (2, 3):
            assert [int(sampler.sample(logits, rows_of([slot], [i])).ids) for i in range(3)] == [7, 7, 7]
        sampler.open([opening(i, frequency_penalty=5.0, temperature=0.0, prompt=()) for i in range(4)])
        for slot in range(4):
            assert [int(sampler.sample(logits, rows_of([slot], [i])).ids) for i in range(3)] == [0, 1, 2]
    assert sampler._table._counts.shape[0] <= 5


def test_slots_without_penalties_hold_no_rows() -> None:
    sampler = make([opening(i, temperature=0.7, top_p=0.9, min_tokens=1, stop_ids=(1,)) for i in range(8)], 100)
    assert sampler._table._counts.shape[0] == 1


def test_features() -> None:
    sampler = make(
        [
            opening(0, temperature=0.0, top_p=0.5),
            opening(1, top_p=0.5, min_p=0.1, logprobs=0),
            opening(2, top_k=9, presence_penalty=1.0, logit_bias={1: 1.0}, min_tokens=2),
        ],
        20,
    )
    assert sampler.features([0]) == frozenset()
    assert sampler.features([0, 1]) == {"noise", "top_p", "min_p", "logprobs"}
    assert sampler.features([2]) == {"noise", "top_k", "penalties", "bias", "min_tokens"}


def test_mistakes_are_named() -> None:
    sampler = make([opening(0)], 10)
    with pytest.raises(PegboardError, match="slot 3 was not opened"):
        sampler.sample(torch.zeros(1, 10), rows_of([3], [0]))
    with pytest.raises(PegboardError, match=r"\(1, 9\)"):
        sampler.sample(torch.zeros(1, 9), rows_of([0], [0]))
    with pytest.raises(PegboardError, match="2 rows of logits"):
        sampler.sample(torch.zeros(2, 10), rows_of([0], [0]))
    with pytest.raises(PegboardError, match="token id 10"):
        sampler.open([opening(0, prompt=(10,))])
    with pytest.raises(PegboardError, match="slot 1 does not exist"):
        sampler.open([opening(1)])


# ---- log-probabilities


@pytest.mark.parametrize("device", DEVICES)
def test_raw_logprobs(device: str) -> None:
    openings = [
        opening(0, temperature=0.0, logprobs=3),
        opening(1, temperature=1.0, logit_bias={4: 9.0}, logprobs=0),
        opening(2, temperature=0.5),
        opening(3, temperature=0.5, top_k=3, logprobs=5),
    ]
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(8)).to(device)
    logits[0, 7] = logits[0, 20] = logits[0, 3] = 4.0
    out = make(openings, 30, device=device).sample(logits, rows_of(range(4), [0] * 4, device))
    assert out.logprobs is not None
    expected = logits.double().log_softmax(-1)
    for row in (0, 1, 3):
        want = float(expected[row, out.ids[row]])
        assert float(out.logprobs.chosen[row]) == pytest.approx(want, abs=1e-5)
    assert math.isnan(float(out.logprobs.chosen[2]))
    assert out.logprobs.top_ids.shape == (4, 5)
    assert out.logprobs.top_ids[0, :3].tolist() == [3, 7, 20]
    assert out.logprobs.top_ids[2].tolist() == [-1] * 5
    best = expected[3].sort(descending=True)
    assert out.logprobs.top_ids[3].tolist() == best.indices[:5].tolist()
    torch.testing.assert_close(out.logprobs.top_values[3].double(), best.values[:5], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kw", [*PARAMS[1:2], *PARAMS[4:10], PARAMS[10], PARAMS[17]], ids=str)
def test_processed_logprobs(kw: dict[str, object]) -> None:
    o = opening(0, seed=4, logprobs=12, logprobs_mode="processed", **kw)
    logits = torch.randn(1, 61, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2
    out = make([o], 61).sample(logits, rows_of([0], [2]))
    allowed = distribution(logits[0].tolist(), o)
    assert out.logprobs is not None
    assert out.ids.tolist() == [chosen_by_definition(logits[0].tolist(), o, 2)]
    assert float(out.logprobs.chosen) == pytest.approx(math.log(allowed[int(out.ids)]), abs=1e-5)
    ranked = sorted(allowed, key=lambda t: (-allowed[t], t))[:12]
    assert out.logprobs.top_ids[0, : len(ranked)].tolist() == ranked
    values = out.logprobs.top_values[0].tolist()
    assert values[: len(ranked)] == pytest.approx([math.log(allowed[t]) for t in ranked], abs=1e-5)
    assert all(value == -math.inf for value in values[len(ranked) :])


def test_processed_logprobs_of_a_greedy_row_are_those_of_the_adjusted_logits() -> None:
    sampler = make(
        [opening(0, temperature=0.0, min_p=0.9, logit_bias={1: 3.0}, logprobs=1, logprobs_mode="processed")], 9
    )
    logits = torch.arange(9.0)[None] / 9
    out = sampler.sample(logits, rows_of([0], [0]))
    bias = torch.zeros(9)
    bias[1] = 3
    assert out.logprobs is not None
    assert out.ids.tolist() == [1]
    assert float(out.logprobs.chosen) == pytest.approx(float((logits + bias).log_softmax(-1)[0, 1]), abs=1e-6)


def test_score() -> None:
    sampler = make([opening(0)], 9)
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(8))
    found = sampler.score(logits, torch.tensor([2, -1, 8]), 4)
    expected = logits.double().log_softmax(-1)
    assert found.chosen.tolist() == pytest.approx([float(expected[0, 2]), math.nan, float(expected[2, 8])], nan_ok=True)
    best = expected.sort(dim=-1, descending=True)
    assert torch.equal(found.top_ids, best.indices[:, :4])
    assert sampler.score(logits, torch.tensor([2, 1, 8]), 0).top_ids.shape == (3, 0)


@pytest.mark.parametrize("k", [0, 1, 3, 7, 11, 12, 20])
def test_best_first_breaks_ties_by_index(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randint(-2, 2, (50, 12), generator=generator).double()
    x[x == -2] = -torch.inf
    values, ids = choice.best_first(x, k)
    for row, found, value in zip(x.tolist(), ids.tolist(), values.tolist(), strict=True):
        expected = sorted(range(12), key=lambda i: (-row[i], i))[:k]
        assert found == expected
        assert value == [row[i] for i in expected]


# ---- verification of drafts


def drafts_of(
    queries: Sequence[Sequence[int]], slots: Sequence[int], positions: Sequence[int], device: str
) -> VerifyRows:
    start = [0]
    for row in queries:
        start.append(start[-1] + len(row))
    return VerifyRows(
        slots=torch.tensor(slots, device=device),
        query_start=torch.tensor(start, dtype=torch.int32, device=device),
        positions=torch.tensor(positions, device=device),
        ids=torch.tensor([id for row in queries for id in row], device=device),
        parents=None,
        probs=None,
        host_slots=tuple(slots),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_verification_keeps_what_step_by_step_sampling_would_have_chosen(device: str) -> None:
    """Ragged rows with drafts that are right up to some point; penalties count the accepted path."""
    vocab, width, generator = 11, 5, torch.Generator().manual_seed(12)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 4, "frequency_penalty": 2.0, "repetition_penalty": 1.4},
        {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 1.0, "min_tokens": 4, "stop_ids": (1, 2)},
        {"temperature": 1.0, "stop_ids": (0, 1, 2, 3)},
        {"temperature": 1.0, "max_length": 12},
    ]
    openings = [opening(i, seed=50 + i, **kw) for i, kw in enumerate(kinds)]
    for trial in range(30):
        sampler = make(openings, vocab, drafts=width - 1, device=device)
        stepwise = make(openings, vocab, device=device)
        sizes = torch.randint(1, width + 1, (len(kinds),), generator=generator).tolist()
        logits = [torch.randn(size, vocab, generator=generator, dtype=torch.float64) * 1.5 for size in sizes]
        position = [10 + trial % 2] * len(kinds)
        queries, expected = [], []
        for slot, size in enumerate(sizes):
            right = int(torch.randint(0, size + 1, (1,), generator=generator))
            row, kept = [0], []
            alive = True
            for j in range(size):
                here = rows_of([slot], [position[slot] + j], device)
                if alive:
                    id = int(stepwise.sample(logits[slot][j : j + 1].to(device), here).ids)
                    kept.append(id)
                    ended = id in openings[slot].stop_ids and len(kept) > openings[slot].sampling.min_tokens
                    full = position[slot] + len(kept) >= openings[slot].max_length
                    draft = id if j < right else (id + 1) % vocab
                    alive = draft == id and not ended and not full
                else:
                    draft = int(torch.randint(0, vocab, (1,), generator=generator))
                if j + 1 < size:
                    row.append(draft)
            queries.append(row)
            expected.append(kept)
        rows = drafts_of(queries, list(range(len(kinds))), position, device)
        out = sampler.verify(torch.cat(logits).to(device), rows)
        assert out.count.tolist() == [len(kept) for kept in expected]
        assert out.ids.tolist() == [kept + [-1] * (width - len(kept)) for kept in expected]
        assert out.path.tolist() == [list(range(len(kept))) + [-1] * (width - len(kept)) for kept in expected]
        # Both samplers now hold the same counts
        logits_after = torch.randn(len(kinds), vocab, generator=generator, dtype=torch.float64).to(device)
        after = rows_of(range(len(kinds)), [20] * len(kinds), device)
        assert torch.equal(sampler.sample(logits_after, after).ids, stepwise.sample(logits_after, after).ids)


def test_absent_drafts_and_broken_rows() -> None:
    sampler = make([opening(0, temperature=0.0), opening(1, temperature=0.0)], 4, drafts=2)
    logits = torch.eye(4)[[1, 2, 3, 0, 1, 2]]
    logits[3, 2] = torch.nan
    out = sampler.verify(logits, drafts_of([[0, 1, -1], [0, 0, 1]], [0, 1], [5, 5], "cpu"))
    assert out.ids.tolist() == [[1, 2, -1], [-1, -1, -1]]
    assert out.count.tolist() == [2, 1]


def test_verification_reports_logprobs_of_the_kept() -> None:
    sampler = make([opening(0, temperature=0.0, logprobs=2)], 4, drafts=1)
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    first = int(logits[0].argmax())
    out = sampler.verify(logits, drafts_of([[0, first]], [0], [5], "cpu"))
    assert out.logprobs is not None
    assert out.logprobs.top_ids.shape == (1, 2, 2)
    expected = logits.double().log_softmax(-1).amax(-1)
    torch.testing.assert_close(out.logprobs.chosen[0].double(), expected, atol=1e-6, rtol=0)


def test_a_path_through_a_tree_is_kept() -> None:
    """Queries: 0, its children 1 and 2, 3 behind 1, 4 and 5 behind 2. After 0 query 2 is chosen, after that 5."""
    sampler = make([opening(0, temperature=0.0, logprobs=1), opening(1, temperature=0.0)], 8, drafts=5)
    logits = torch.full((9, 8), -4.0)
    for query, best in enumerate([3, 6, 5, 6, 6, 1, 2, 4, 4]):
        logits[query, best] = 2.0 + query
    rows = drafts_of([[0, 2, 3, 3, 7, 5], [0, 2, 2]], [0, 1], [5, 9], "cpu")
    rows = msgspec.structs.replace(rows, parents=torch.tensor([-1, 0, 0, 1, 2, 2, -1, 0, 1]))
    out = sampler.verify(logits, rows)
    assert out.ids.tolist() == [[3, 5, 1, -1, -1, -1], [2, 4, -1, -1, -1, -1]]
    assert out.count.tolist() == [3, 2]
    assert out.path.tolist() == [[0, 2, 5, -1, -1, -1], [0, 1, -1, -1, -1, -1]]
    assert out.logprobs is not None
    expected = logits.double().log_softmax(-1).amax(-1)[[0, 2, 5]]
    torch.testing.assert_close(out.logprobs.chosen[0, :3].double(), expected, atol=1e-6, rtol=0)
    assert out.logprobs.top_ids[0, :3].flatten().tolist() == [3, 5, 1]


def test_draft_distributions_are_refused() -> None:
    sampler = make([opening(0)], 4, drafts=1)
    rows = drafts_of([[0, 1]], [0], [5], "cpu")
    with pytest.raises(PegboardError, match="probs"):
        sampler.verify(torch.zeros(2, 4), msgspec.structs.replace(rows, probs=torch.zeros(2, 4)))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("device", DEVICES[1:])
def test_nothing_synchronises(device: str) -> None:
    modes: list[dict[str, object]] = [{}, {"logprobs": 2}, {"logprobs": 1, "logprobs_mode": "processed"}]
    kinds = [{**kw, **mode} for kw in PARAMS for mode in modes]
    openings = [opening(i, seed=i, **kw) for i, kw in enumerate(kinds)]
    sampler = make(openings, 61, drafts=1, device=device)
    logits = torch.randn(2 * len(kinds), 61, device=device)
    rows = rows_of(range(len(kinds)), [4] * len(kinds), device)
    drafts = drafts_of([[1, 2]] * len(kinds), range(len(kinds)), [4] * len(kinds), device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.open(openings)
        sampler.sample(logits[::2], rows)
        sampler.verify(logits, drafts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
