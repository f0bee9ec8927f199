"""The part of the suite for samplers about what is chosen: each parameter, ties, the distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from ..dtypes import torch_dtype
from .conformance import Candidate, check
from .oracles.sampling import chi_square_limit, choose
from .sampler_bench import SamplerBench

#: A prompt with a token that comes twice.
PROMPT: Final = (3, 5, 5, 8)

#: (logits, parameters, what may be chosen): every member must turn up, nothing else. All numbers are exact in bfloat16.
_SUPPORT: Final[Sequence[tuple[list[float], dict[str, Any], set[int]]]] = (
    ([1.0, 3.0, 3.0, 3.0, 0.0], {"top_k": 2}, {1, 2}),
    ([1.0, 3.0, 2.0, 2.0, 2.0], {"top_k": 3}, {1, 2, 3}),
    ([0.0] * 8, {"top_k": 3}, {0, 1, 2}),
    ([0.0] * 8, {"top_k": 100}, set(range(8))),
    ([0.0] * 8, {"top_p": 0.51}, {0, 1, 2, 3, 4}),
    ([0.0] * 8, {"top_k": 4, "top_p": 0.3}, {0, 1}),
    ([0.0] * 8, {"top_p": 0.01}, {0}),
    ([0.0] * 8, {"min_p": 1.0}, set(range(8))),
    ([2.0, 0.0, 2.0], {"min_p": 1.0}, {0, 2}),
    ([0.0, -math.inf, 0.0, -math.inf], {}, {0, 2}),
    ([0.0, -math.inf, 0.0, -math.inf], {"top_k": 3}, {0, 2}),
    ([0.0, -math.inf, 0.0, -math.inf], {"top_p": 0.999}, {0, 2}),
    ([-math.inf, -math.inf, -50.0], {"top_k": 2, "top_p": 0.1}, {2}),
    ([0.0, 1e30, 0.0], {}, {1}),
)

_DISTRIBUTIONS: Final[Sequence[dict[str, Any]]] = (
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"top_k": 4},
    {"top_p": 0.7},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
    {"min_p": 0.2},
    {"repetition_penalty": 2.0, "prompt": PROMPT},
    {"logit_bias": {9: 3.0}},
)


class SamplerChoices(SamplerBench, standard=True):
    """Tests of the parameters."""

    # -- choices

    def test_greedy_takes_the_first_of_equals(self, candidate: Candidate, dtype: str) -> None:
        kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}]
        rows = ([2.0, 7.0, 7.0, 1.0, 7.0], [3.0] * 5, [-1.0, -2.0, -1.0, -1.0, -9.0])
        sampler = self.make(candidate, [self.opening(slot, **kind) for slot, kind in enumerate(kinds)], 5)
        for row, first in zip(rows, (1, 0, 0), strict=True):
            logits = torch.tensor([row] * 3, dtype=torch_dtype(dtype), device=self.device)
            ids = self.sample(sampler, logits, [0, 1, 2], [4, 5, 6]).ids.tolist()
            check(ids == [first] * 3, f"{row}: greedy chose {ids} (temperature 0, top_k 1, top_p 0), not {first}")

    def test_temperature(self, candidate: Candidate, dtype: str) -> None:
        self.hold(candidate, dtype, *({"temperature": t} for t in (0.0, 0.3, 0.7, 1.0, 2.5)))

    def test_top_k(self, candidate: Candidate, dtype: str) -> None:
        self.hold(candidate, dtype, *({"top_k": k, "temperature": 1.5} for k in (1, 2, 5, 60, 61, 10_000)))

    def test_top_p(self, candidate: Candidate, dtype: str) -> None:
        self.hold(candidate, dtype, *({"top_p": p, "temperature": 1.3} for p in (0.0, 0.1, 0.6, 0.95)))

    def test_min_p(self, candidate: Candidate, dtype: str) -> None:
        self.hold(candidate, dtype, *({"min_p": p, "temperature": 1.2} for p in (0.01, 0.1, 0.9)))

    def test_top_k_top_p_and_min_p_in_this_order(self, candidate: Candidate, dtype: str) -> None:
        """top-p counts the mass that top-k left."""
        self.hold(
            candidate,
            dtype,
            {"temperature": 2.0, "top_k": 20, "top_p": 0.8},
            {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
            {"temperature": 1.4, "top_p": 0.9, "min_p": 0.1},
            {"temperature": 1.4, "top_k": 9, "min_p": 0.1},
        )

    def test_penalties(self, candidate: Candidate, dtype: str) -> None:
        """Repetition counts prompt and output, presence and frequency the output only."""
        text: dict[str, Any] = {"prompt": PROMPT, "output": (1, 1, 9, 5, 30, 30, 30)}
        self.hold(
            candidate,
            dtype,
            {"repetition_penalty": 1.9, **text},
            {"repetition_penalty": 0.5, **text},
            {"presence_penalty": 3.0, **text},
            {"frequency_penalty": 1.5, **text},
            {"temperature": 0.0, "frequency_penalty": -2.0, **text},
            {"repetition_penalty": 1.3, "presence_penalty": -2.0, "frequency_penalty": 0.4, "temperature": 0.6, **text},
        )

    def test_bias(self, candidate: Candidate, dtype: str) -> None:
        self.hold(
            candidate, dtype, {"logit_bias": {7: 4.0, 11: -100.0}}, {"temperature": 0.0, "logit_bias": {13: 50.0}}
        )

    def test_min_tokens(self, candidate: Candidate, dtype: str) -> None:
        """Stop ids are masked until that many tokens were chosen."""
        stops = tuple(range(0, 61, 2))
        self.hold(
            candidate,
            dtype,
            {"min_tokens": 2, "output": (4,), "stop_ids": stops},
            {"min_tokens": 1, "output": (4,), "stop_ids": stops},
            {"temperature": 0.0, "min_tokens": 1, "stop_ids": stops},
        )

    def test_everything_at_once(self, candidate: Candidate, dtype: str) -> None:
        everything: dict[str, Any] = {
            "temperature": 0.6,
            "top_k": 8,
            "top_p": 0.9,
            "min_p": 0.01,
            "repetition_penalty": 0.8,
            "frequency_penalty": 0.3,
            "logit_bias": {1: 9.0, 3: -9.0},
            "prompt": PROMPT,
            "output": (6,),
            "min_tokens": 3,
            "stop_ids": (2, 4),
        }
        self.hold(candidate, dtype, everything, {"temperature": 0.0}, everything | {"top_k": 0}, {})

    def test_large_vocabularies(self, candidate: Candidate, dtype: str) -> None:
        """Flat and peaked rows of thousands of tokens."""
        vocab = 1009 if self.grid == "small" else 5003
        kinds: list[dict[str, Any]] = [
            {},
            {"top_p": 0.9},
            {"temperature": 0.3, "top_p": 0.99},
            {"temperature": 0.1, "min_p": 0.001},
            {"top_k": 700},
        ]
        openings = [self.opening(slot, **kind) for slot, kind in enumerate(kinds)]
        sampler = self.make(candidate, openings, vocab)
        for position, size in enumerate((0.0, 0.5, 8.0)):
            logits = self.logits(len(kinds), vocab, dtype, seed=position, size=size)
            ids = self.sample(sampler, logits, range(len(kinds)), [position] * len(kinds)).ids.tolist()
            self.hold_choices(ids, logits, openings, position, dtype)

    @pytest.mark.parametrize(
        ("row", "kind", "allowed"), _SUPPORT, ids=[f"{kind}-{i}" for i, (_, kind, _) in enumerate(_SUPPORT)]
    )
    def test_exact_support(
        self, candidate: Candidate, row: list[float], kind: dict[str, Any], allowed: set[int]
    ) -> None:
        """Equal logits: who is in the set is a matter of ids, and everyone in it must turn up."""
        counts = self.count(
            candidate, torch.tensor(row, dtype=torch_dtype(self.dtypes[0])), 500 if self.grid != "small" else 200, kind
        )
        check(set(counts) == allowed, f"{row} with {kind} gave {sorted(counts)}, must be {sorted(allowed)}")

    @pytest.mark.parametrize("kind", _DISTRIBUTIONS, ids=str)
    def test_distribution(self, candidate: Candidate, kind: dict[str, Any]) -> None:
        """Chi-square over seeds and positions, at 99.99 %."""
        logits = torch.tensor([2.0, 1.5, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0])
        draws = 1_000 if self.grid == "small" else 20_000
        expected = choose(logits, self.opening(0, **kind), 0).probabilities
        counts = self.count(candidate, logits.to(torch_dtype(self.dtypes[0])), draws, kind)
        possible = [token for token, p in enumerate(expected.tolist()) if p > 0]
        check(set(counts) <= set(possible), f"{sorted(set(counts) - set(possible))} were chosen, and can't be")
        statistic = sum(
            (counts.get(t, 0) - draws * float(expected[t])) ** 2 / (draws * float(expected[t])) for t in possible
        )
        limit = chi_square_limit(len(possible) - 1)
        check(statistic < limit, f"chi-square {statistic:.1f} of {draws} draws is above {limit:.1f}: {counts}")
