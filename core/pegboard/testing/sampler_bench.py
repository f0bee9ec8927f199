"""Slots and logits for samplers to be tried on, and what they must give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..contracts.sampler import (
    LogprobTensors,
    SampleOutput,
    Sampler,
    SamplerNeed,
    SampleRows,
    SamplingParams,
    SlotOpening,
    VerifyRows,
)
from ..dtypes import torch_dtype
from ..noise import child_seed
from .conformance import Candidate, Suite, Tolerance, check, compare, normal
from .oracles.sampling import choose

#: A score decides by more than this, or either may win. Logits are exact, so it is the sampler's own arithmetic that
#: counts: float32 for scores up to a hundred, float64 when the logits are.
_NEAR: Final = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-4, "bfloat16": 1e-4}
#: log_softmax in float32
_LOGPROB: Final = Tolerance(1e-5, 1e-5)


class SamplerBench(Suite, standard=True):
    """What the tests of `SamplerSuite` work with."""

    role = "sampler"
    features = ("verify", "trees", "batch_invariant")

    # -- what is sampled

    @classmethod
    def need(cls, vocab: int, slots: int, **changes: Any) -> SamplerNeed:
        fields: dict[str, Any] = {"device": cls.facts(), "vocab_size": vocab, "slots": slots, "max_length": 1000}
        return SamplerNeed(**(fields | changes))

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, SamplerNeed]]:
        yield "any vocabulary", cls.need(50, 4)
        claims: dict[str, dict[str, Any]] = {
            "verify": {"max_drafts": 3},
            "trees": {"max_drafts": 3, "trees": True},
            "batch_invariant": {"batch_invariant": True},
        }
        for claim in cls.claims:
            yield f"claim {claim}", cls.need(50, 4, **claims[claim])

    @staticmethod
    def opening(slot: int, **facts: Any) -> SlotOpening:
        """Fields of the opening, others are sampling parameters. The seed is the slot, the temperature 1."""
        record: dict[str, Any] = {"prompt": (), "seed": slot, "max_length": 1000}
        for name in ("prompt", "output", "stop_ids", "seed", "max_length"):
            if name in facts:
                record[name] = facts.pop(name)
        return SlotOpening(slot=slot, sampling=SamplingParams(**facts), **record)

    def make(self, candidate: Candidate, openings: Sequence[SlotOpening], vocab: int, **changes: Any) -> Sampler:
        need = self.need(vocab, max(opening.slot for opening in openings) + 1, **changes)
        sampler: Sampler = candidate.create(need)
        sampler.open(openings)
        return sampler

    def sample_rows(self, slots: Sequence[int], positions: Sequence[int]) -> SampleRows:
        return SampleRows(
            slots=torch.tensor(slots, dtype=torch.int64, device=self.device),
            positions=torch.tensor(positions, dtype=torch.int64, device=self.device),
            host_slots=tuple(slots),
        )

    def sample(self, sampler: Sampler, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> SampleOutput:
        """Of a copy of the logits: whether they are changed is the matter of one test."""
        with torch.inference_mode():
            return sampler.sample(logits.clone(), self.sample_rows(slots, positions))

    def logits(self, rows: int, vocab: int, dtype: str, seed: int = 0, size: float = 2.0) -> Tensor:
        return (normal(rows, vocab, seed=seed) * size).to(self.device, torch_dtype(dtype))

    def hold(self, candidate: Candidate, dtype: str, *kinds: dict[str, Any], vocab: int = 61, steps: int = 8) -> None:
        """One slot a kind, side by side: every choice must be the definition's."""
        openings = [self.opening(slot, **kind) for slot, kind in enumerate(kinds)]
        steps = 2 if self.grid == "small" else 5 * steps if self.grid == "full" else steps
        sampler = self.make(candidate, openings, vocab)
        for position in range(steps):
            sampler.open(openings)  # forget what was chosen
            logits = self.logits(len(kinds), vocab, dtype, seed=position)
            ids = self.sample(sampler, logits, range(len(kinds)), [position] * len(kinds)).ids.tolist()
            self.hold_choices(ids, logits, openings, position, dtype)

    def hold_choices(
        self, ids: Sequence[int], logits: Tensor, openings: Sequence[SlotOpening], position: int, dtype: str
    ) -> None:
        for id, row, opening in zip(ids, logits, openings, strict=True):
            problem = choose(row, opening, position).problem(id, _NEAR[dtype])
            check(not problem, f"{opening.sampling} at position {position}: {problem}")

    def count(self, candidate: Candidate, row: Tensor, draws: int, kind: dict[str, Any]) -> dict[int, int]:
        """How often each token is chosen over 100 seeds and as many positions as it takes."""
        openings = [self.opening(slot, **{**kind, "seed": child_seed(77, slot)}) for slot in range(100)]
        sampler = self.make(candidate, openings, row.shape[0])
        logits = row.to(self.device).expand(100, -1).contiguous()
        counts: dict[int, int] = {}
        for position in range(draws // 100):
            sampler.open(openings)  # forget what was chosen
            for token in self.sample(sampler, logits, range(100), [position] * 100).ids.tolist():
                counts[token] = counts.get(token, 0) + 1
        return counts

    def hold_logprobs(self, found: LogprobTensors | None, at: int, expected: Tensor, chosen: int, top: int) -> None:
        """Row `at` must be the log-probabilities `expected` [V] of the chosen id and of the `top` most probable."""
        if found is None:
            raise AssertionError("no log-probabilities, though rows ask for them")
        expected = expected.cpu()
        compare(found.chosen[at], expected[chosen], _LOGPROB, f"row {at}: the chosen token {chosen}")
        values, ids = expected.sort(descending=True, stable=True)
        compare(found.top_values[at, :top], values[:top], _LOGPROB, f"row {at}: the {top} most probable")
        told = found.top_ids[at, :top].tolist()
        likely = int((values[:top] > -torch.inf).sum())
        compare(expected[told[:likely]], values[:likely], _LOGPROB, f"row {at}: the values of the ids {told}")
        equal = [
            i
            for i in range(1, likely)
            if values[i] == values[i - 1] and ids[i - 1 : i + 1].tolist() != told[i - 1 : i + 1]
        ]
        check(not equal, f"row {at}: of equals the lower id comes first: {told}, must be {ids[:top].tolist()}")

    # -- drafts

    def verify_rows(
        self,
        queries: Sequence[Sequence[int]],
        positions: Sequence[int],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> VerifyRows:
        """A row a slot: the last token, then its drafts; `parents` of trees."""
        starts = [sum(len(row) for row in queries[:at]) for at in range(len(queries) + 1)]
        return VerifyRows(
            slots=torch.arange(len(queries), device=self.device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=self.device),
            positions=torch.tensor(positions, device=self.device),
            ids=torch.tensor([id for row in queries for id in row], device=self.device),
            parents=None
            if parents is None
            else torch.tensor([parent for row in parents for parent in row], device=self.device),
            probs=None,
            host_slots=tuple(range(len(queries))),
        )
