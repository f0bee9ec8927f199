"""A sampler with its reference beside it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

from msgspec.structs import replace
from torch import Tensor

from pegboard.contracts.sampler import (
    LogprobTensors,
    SampleOutput,
    Sampler,
    SampleRows,
    SlotOpening,
    VerifyOutput,
    VerifyRows,
)

from .log import ShadowLog


class _Past:
    """What a slot was opened with, and the tokens chosen since."""

    def __init__(self, opening: SlotOpening) -> None:
        self._opening = opening
        #: (ids of a step, the slot's place in them); -1: none.
        self._chosen: list[tuple[Tensor, int]] = []

    def add(self, ids: Tensor, place: int) -> None:
        self._chosen.append((ids, place))

    def opening(self) -> SlotOpening:
        """As after a preemption. Waits for the device."""
        chosen = [ids[place].reshape(-1).tolist() for ids, place in self._chosen]
        tokens = tuple(id for found in chosen for id in found if id >= 0)
        self._opening, self._chosen = replace(self._opening, output=(*self._opening.output, *tokens)), []
        return self._opening


class BesideSampler(Sampler):
    """Remembers what was chosen in every step, so that in a compared one the reference's slots can be opened as after
    a preemption: once it chose another token, its own state would never be right again. Reading the tokens waits for
    the device, in compared steps only."""

    def __init__(self, main: Sampler, reference: Sampler, log: ShadowLog) -> None:
        self._main, self._reference, self._log = main, reference, log
        self._past: dict[int, _Past] = {}
        self.needs_host_token = main.needs_host_token

    @classmethod
    def refusals(cls, need: Any, options: Any) -> Sequence[str]:
        return ["is made by shadow mode only"]

    @classmethod
    def create(cls, need: Any, options: Any) -> NoReturn:
        raise NotImplementedError("made by shadow mode only")

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._main.open(openings)
        self._past.update((opening.slot, _Past(opening)) for opening in openings)

    def features(self, host_slots: Sequence[int]) -> frozenset[str]:
        return self._main.features(host_slots)

    def graph_key(self, host_slots: Sequence[int]) -> Hashable:
        return self._main.graph_key(host_slots)

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        out = self._main.sample(logits, rows)
        if self._log.active:
            ids = out.ids.clone()
            plain = replace(rows, key=None)  # the key is the main sampler's
            expected = self._log.run("sampler", lambda: self._reopened(rows.host_slots).sample(logits, plain))
            if expected is not None:
                self._log.compare_ids("sampler", _rows(rows.host_slots), ids, expected.ids)
                self._compare_logprobs(out.logprobs, expected.logprobs)
        self._remember(rows.host_slots, out.ids)
        return out

    def verify(self, logits: Tensor, rows: VerifyRows) -> VerifyOutput:
        out = self._main.verify(logits, rows)
        if self._log.active:
            expected = self._log.run("sampler", lambda: self._reopened(rows.host_slots).verify(logits, rows))
            if expected is not None:
                self._log.compare_ids("sampler", _rows(rows.host_slots), out.ids, expected.ids)
        self._remember(rows.host_slots, out.ids)
        return out

    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        out = self._main.score(logits, targets, top)
        if self._log.active:
            expected = self._log.run("sampler", lambda: self._reference.score(logits, targets, top))
            self._compare_logprobs(out, expected)
        return out

    def _reopened(self, slots: Sequence[int]) -> Sampler:
        self._reference.open([self._past[slot].opening() for slot in slots])
        return self._reference

    def _remember(self, slots: Sequence[int], ids: Tensor) -> None:
        ids = ids.clone()  # valid until the next call only
        for place, slot in enumerate(slots):
            self._past[slot].add(ids, place)

    def _compare_logprobs(self, found: LogprobTensors | None, expected: LogprobTensors | None) -> None:
        if found is not None and expected is not None:
            self._log.compare("sampler", self._log.nth("log-probabilities"), found.chosen, expected.chosen)


def _rows(slots: Sequence[int]) -> list[str]:
    return [f"slot {slot}" for slot in slots]
