"""What may be chosen, and how often: TorchSampler against the definitions, on rows made to break it.

The exact support comes from the sampler's own processed log-probabilities of every token, and draws must lie in it; its
frequencies are held against the definition by chi-square, with fixed seeds, so that a test passes always or never.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pegboard import Engine, Request, SamplingParams
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed, SampleRows, SlotOpening
from pegboard.noise import child_seed
from pegboard_sampling.torch_sampler import TorchSampler

FULL = bool(os.environ.get("PEGBOARD_FULL"))
INF, NAN = math.inf, math.nan
#: Tokens whose cumulative mass lies so close to top_p may fall either way.
TOLERANCE = 1e-6
PROMPT, OUTPUT = (3, 5, 5, 8), (1, 1, 9, 5)


class Definition:
    """Penalties, bias, temperature, top-k, top-p on what top-k left, min-p; ties by id. In float64, token by token."""

    def __init__(
        self, logits: Sequence[float], p: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        z = [self._adjusted(t, value, p, prompt, output) for t, value in enumerate(logits)]
        peak = max(z)
        self.greedy = z.index(peak)
        if p.temperature == 0 or p.top_k == 1 or p.top_p == 0:
            self.weights, self.must = {self.greedy: 1.0}, {self.greedy}
            return
        order = sorted(range(len(z)), key=lambda t: (-z[t], t))[: p.top_k or None]
        # Equal infinite logits share all the mass.
        weights = {t: 1.0 if z[t] == peak else math.exp((z[t] - peak) / p.temperature) for t in order}
        weights = {t: weight for t, weight in weights.items() if weight > 1e-280}  # or else never in a lifetime
        total, before = math.fsum(weights.values()), 0.0
        self.weights: dict[int, float] = {}
        self.must: set[int] = set()
        for t, weight in weights.items():
            if (p.top_p == 1 or before < p.top_p + TOLERANCE) and weight >= p.min_p:
                self.weights[t] = weight
                if p.top_p == 1 or before < p.top_p - TOLERANCE or not self.must:
                    self.must.add(t)
            before += weight / total

    @staticmethod
    def _adjusted(t: int, value: float, p: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> float:
        if t in prompt or t in output:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        if t in output:
            value -= p.presence_penalty + p.frequency_penalty * list(output).count(t)
        return value + p.logit_bias.get(t, 0.0)

    @property
    def may(self) -> set[int]:
        return set(self.weights)

    @property
    def probabilities(self) -> dict[int, float]:
        """Only where the support leaves no choice."""
        assert self.must == self.may
        total = math.fsum(self.weights.values())
        return {t: weight / total for t, weight in self.weights.items()}


def sampler_of(
    params: Sequence[SamplingParams], vocab: int, prompt: Sequence[int] = (), output: Sequence[int] = (), seed: int = 5
) -> TorchSampler:
    """One slot for each of the params, every one with a seed of its own."""
    need = SamplerNeed(device=DeviceFacts(type="cpu"), vocab_size=vocab, slots=len(params), max_length=10_000)
    sampler = TorchSampler.create(need, None)
    sampler.open(
        [
            SlotOpening(
                slot=slot,
                sampling=own,
                seed=child_seed(seed, slot),
                prompt=tuple(prompt),
                output=tuple(output),
                max_length=10_000,
            )
            for slot, own in enumerate(params)
        ]
    )
    return sampler


def rows_of(count: int, position: int) -> SampleRows:
    return SampleRows(
        slots=torch.arange(count), positions=torch.full((count,), position), host_slots=tuple(range(count))
    )


def reported(logits: Sequence[float], **kw: Any) -> dict[int, float]:
    """Token -> probability, of everything that the sampler says it may choose."""
    params = SamplingParams(**kw, logprobs=len(logits), logprobs_mode="processed")
    row = torch.tensor([logits], dtype=torch.float64)
    found = sampler_of([params], len(logits)).sample(row, rows_of(1, 0)).logprobs
    assert found is not None
    pairs = zip(found.top_ids[0].tolist(), found.top_values[0].tolist(), strict=True)
    return {t: math.exp(value) for t, value in pairs if value > math.log(1e-250)}


def drawn(logits: Sequence[float], draws: int, prompt: Any = (), output: Any = (), **kw: Any) -> Counter[int]:
    """How often each token is chosen, over 100 seeds and as many positions as it takes."""
    counts: Counter[int] = Counter()
    params = [SamplingParams(**kw)] * 100
    rows = torch.tensor(logits, dtype=torch.float64).expand(100, -1)
    for position in range(draws // 100):
        sampler = sampler_of(params, len(logits), prompt, output)  # a new one: the output counts
        counts.update(sampler.sample(rows, rows_of(100, position)).ids.tolist())
    return counts


# ---- support


def flat(random: Random, vocab: int) -> list[float]:
    return [random.choice([0.0, -3.5, 7.25])] * vocab


def tied(random: Random, vocab: int) -> list[float]:
    return [float(random.randint(-2, 2)) for _ in range(vocab)]


def one_huge(random: Random, vocab: int) -> list[float]:
    row = [random.gauss(0, 1) for _ in range(vocab)]
    row[random.randrange(vocab)] = random.choice([50.0, 1e4, 1e30])
    return row


def mostly_masked(random: Random, vocab: int) -> list[float]:
    row = [-INF] * vocab
    for t in random.sample(range(vocab), random.randint(1, min(4, vocab))):
        row[t] = random.choice([0.0, 0.0, 1.0, -1e30, random.gauss(0, 3)])
    return row


def infinite(random: Random, vocab: int) -> list[float]:
    row = tied(random, vocab)
    for t in random.sample(range(vocab), random.randint(1, min(3, vocab))):
        row[t] = INF
    return row


def ordinary(random: Random, vocab: int) -> list[float]:
    spread = random.choice([0.01, 1.0, 20.0])
    return [random.gauss(0, spread) for _ in range(vocab)]


FAMILIES = [flat, tied, one_huge, mostly_masked, infinite, ordinary]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_exact_support_and_probabilities(family: Callable[[Random, int], list[float]]) -> None:
    random, ambiguous = Random(family.__name__), 0
    trials = 1000 if FULL else 120
    for trial in range(trials):
        vocab = random.choice([1, 2, 7, 31, 61, 257, 1009])
        logits = family(random, vocab)
        kw = {
            "temperature": random.choice([1e-6, 0.01, 0.3, 1.0, 1.0, 7.0, 1e4]),
            "top_k": random.choice([0, 0, 1, 2, 3, 17, max(vocab - 1, 1), vocab, vocab + 5, 1 << 30]),
            "top_p": random.choice([0.0, 1e-9, 0.25, 0.5, 0.75, 0.9, 1 - 1e-9, 1.0, 1.0]),
            "min_p": random.choice([0.0, 0.0, 1e-9, 0.1, 0.5, 1.0]),
        }
        expected, found = Definition(logits, SamplingParams(**kw), (), ()), reported(logits, **kw)
        told = f"{family.__name__} {trial}: {vocab} tokens, {kw}"
        assert len(found) >= 1, told
        if kw["temperature"] > 0 and kw["top_k"] != 1 and kw["top_p"] > 0:  # greedy reports its unfiltered row
            must = {t for t in expected.must if expected.weights[t] > 1e-240}
            assert must <= set(found) <= expected.may, told
            if expected.must == expected.may:
                for t, probability in expected.probabilities.items():
                    assert found.get(t, 0.0) == pytest.approx(probability, rel=1e-4, abs=1e-12), told
            else:
                ambiguous += 1
        few = sampler_of([SamplingParams(**kw)] * 20, vocab)
        rows = torch.tensor(logits, dtype=torch.float64).expand(20, -1)
        assert set(few.sample(rows, rows_of(20, trial)).ids.tolist()) <= expected.may, told
    assert ambiguous < trials / 3


@pytest.mark.parametrize(
    ("logits", "kw", "allowed"),
    [
        # top-k before top-p: half of the mass of three, not of five
        ([0.0] * 5, {"top_k": 3, "top_p": 0.5}, {0, 1}),
        ([0.0] * 5, {"top_p": 0.5}, {0, 1, 2}),
        # temperature before top-p: 0.88, 0.12 at 1, 0.73, 0.27 at 2
        ([2.0, 0.0], {"top_p": 0.8}, {0}),
        ([2.0, 0.0], {"top_p": 0.8, "temperature": 2.0}, {0, 1}),
        # min-p after temperature: 0.37 at 1, 0.61 at 2, 0.14 at 0.5
        ([1.0, 0.0], {"min_p": 0.4}, {0}),
        ([1.0, 0.0], {"min_p": 0.4, "temperature": 2.0}, {0, 1}),
        ([1.0, 0.0], {"min_p": 0.3}, {0, 1}),
        ([1.0, 0.0], {"min_p": 0.3, "temperature": 0.5}, {0}),
        # bias before temperature and top-k
        ([3.0, 2.0, 1.0], {"top_k": 2, "logit_bias": {2: 1.5}}, {0, 2}),
        ([0.0, 0.0], {"min_p": 0.4, "logit_bias": {0: 1.0}, "temperature": 2.0}, {0, 1}),
        # penalties before bias and temperature: token 1 is of the output twice, 0 of the prompt
        ([4.0, 4.0, 1.0], {"frequency_penalty": 1.75, "top_k": 2}, {0, 2}),
        ([4.0, 4.0, 1.0], {"repetition_penalty": 8.0, "top_k": 1}, {2}),
        ([4.0, 4.0, 1.0], {"repetition_penalty": 8.0, "logit_bias": {0: 0.75}, "top_k": 2}, {0, 2}),
        ([-1.0, -1.5, -9.0], {"repetition_penalty": 2.0, "top_k": 1}, {0}),
        # ties at the boundary, by id
        ([1.0, 2.0, 1.0, 1.0], {"top_k": 2}, {0, 1}),
        ([1.0, 1.0, 1.0, 2.0], {"top_p": 0.5}, {0, 3}),
        ([-0.0, 0.0, -0.0], {"top_k": 2}, {0, 1}),
    ],
    ids=str,
)
def test_the_order_of_the_rules(logits: list[float], kw: dict[str, Any], allowed: set[int]) -> None:
    found = drawn(logits, 600, (0,), (1, 1), **kw)
    assert set(found) == allowed
    assert Definition(logits, SamplingParams(**kw), (0,), (1, 1)).may == allowed


@pytest.mark.parametrize("kw", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("vocab", [1, 13, 1009])
def test_rows_without_a_choice_fail_alone(vocab: int, kw: dict[str, Any]) -> None:
    good = [math.sin(t) for t in range(vocab)]
    cases = {
        "all masked": ([-INF] * vocab, -2),
        "all NaN": ([NAN] * vocab, -1),
        "one NaN": ([*good[:-1], NAN], -1),
        "NaN beside infinity": ([INF, *good[1:-1], NAN] if vocab > 1 else [NAN], -1),
        "NaN beside masks": ([-INF] * (vocab - 1) + [NAN], -1),
    }
    rows = [good, *(row for row, _ in cases.values()), good]
    params = [SamplingParams(**kw)] * len(rows)
    ids = sampler_of(params, vocab).sample(torch.tensor(rows), rows_of(len(rows), 3)).ids.tolist()
    assert dict(zip(cases, ids[1:-1], strict=True)) == {name: id for name, (_, id) in cases.items()}
    alone = sampler_of(params, vocab).sample(torch.tensor([good] * len(rows)), rows_of(len(rows), 3)).ids.tolist()
    assert (ids[0], ids[-1]) == (alone[0], alone[-1])


@pytest.mark.parametrize(
    "logits", [[0.0, 1e-3, -1e-3, 5e-4], [5.0, 5.0, 4.999, -INF], [1e4, 1e4 + 1, 0.0, 1.0]], ids=str
)
def test_a_tiny_temperature_is_greedy_but_for_ties(logits: list[float]) -> None:
    best = {t for t, value in enumerate(logits) if value == max(logits)}
    assert set(drawn(logits, 600, temperature=1e-8)) == best


# ---- frequencies


def chi_square(counts: Counter[int], expected: dict[int, float]) -> tuple[float, float]:
    """The statistic, and what it exceeds once in a thousand (Wilson and Hilferty 1931). Cells of less than 5 are put
    together."""
    draws = counts.total()
    assert set(counts) <= set(expected)
    cells, rest = [], [0.0, 0.0]
    for t, probability in expected.items():
        if draws * probability >= 5:
            cells.append([counts[t], draws * probability])
        else:
            rest = [rest[0] + counts[t], rest[1] + draws * probability]
    if rest[1] >= 5:
        cells.append(rest)
    else:
        cells[0] = [cells[0][0] + rest[0], cells[0][1] + rest[1]]
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((seen - right) ** 2 / right for seen, right in cells), limit


def slope(vocab: int) -> list[float]:
    """Steps of four equal logits."""
    return [2.0 - (t // 4) * 0.4 for t in range(vocab)]


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.15,
    "logit_bias": {2: 0.8, 6: -0.6, 9: 1.5},
    "temperature": 1.4,
    "top_k": 11,
    "top_p": 0.93,
    "min_p": 0.2,
}


@pytest.mark.parametrize(
    ("logits", "kw"),
    [
        (slope(13), EVERYTHING),
        (slope(13), EVERYTHING | {"temperature": 0.5, "top_k": 0, "min_p": 0.0}),
        (slope(13), {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.7}),
        (slope(13), {"top_k": 6}),  # a tie of four is cut in two
        (slope(13), {"top_k": 6, "top_p": 0.6}),
        (slope(13), {"top_p": 0.55, "min_p": 0.7}),
        (slope(13), {"temperature": 1e4}),
        (slope(61), {"temperature": 3.0, "min_p": 0.02}),
        ([0.0] * 31, {"temperature": 0.01}),
        ([0.0] * 31, {"top_k": 7, "top_p": 0.7}),
        ([INF, 0.0, INF, INF, -INF, *[0.0] * 5], {"temperature": 5.0}),
        ([-INF] * 50 + [0.0, 0.5, 1.0] + [-INF] * 50, {"top_p": 0.999}),
        ([math.cos(t) for t in range(1009)], {"temperature": 0.25}),
        ([math.cos(t) for t in range(1009)], {"temperature": 0.25, "top_k": 40}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else str(len(value)),
)
def test_chi_square(logits: list[float], kw: dict[str, Any]) -> None:
    expected = Definition(logits, SamplingParams(**kw), PROMPT, OUTPUT).probabilities
    counts = drawn(logits, 60_000 if FULL else 12_000, PROMPT, OUTPUT, **kw)
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


def test_the_chi_square_sees_a_difference() -> None:
    """The test can fail: frequencies of temperature 1.0 are not those of 1.2."""
    logits = slope(13)
    expected = Definition(logits, SamplingParams(temperature=1.2), (), ()).probabilities
    statistic, limit = chi_square(drawn(logits, 12_000, temperature=1.0), expected)
    assert statistic > limit


@pytest.mark.supports("Sampling", "temperature, top-k and top-p give the defined distribution")
@pytest.mark.parametrize("ahead", [0, 2])
def test_through_an_engine(tiny_path: Path, make_engine: Callable[..., Engine], ahead: int) -> None:
    """One request a seed; the model's logits by transformers in float64."""
    from transformers import AutoModelForCausalLM

    prompt, requests = [1, 17, 42], 6_000 if FULL else 1200
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float64).eval()
        logits = model(torch.tensor([prompt])).logits[0, -1].tolist()
    kw: dict[str, Any] = {"temperature": 2.5, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "min_p": 0.01}
    engine = make_engine(tiny_path, device="cpu", dtype="float64", max_length=64, max_rows=64, run_ahead=ahead)
    found = engine.generate(
        [
            Request(prompt=prompt, sampling=SamplingParams(**kw, seed=seed, max_tokens=1, ignore_eos=True))
            for seed in range(requests)
        ]
    )
    counts = Counter(output.token_ids[0] for output in found)
    expected = Definition(logits, SamplingParams(**kw), prompt, ()).probabilities
    assert len(expected) > 8
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit
