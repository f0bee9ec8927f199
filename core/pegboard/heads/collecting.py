"""A speculator that proposes nothing, and writes down the hidden states that it is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from ..contracts.part import Part
from ..contracts.sampler import SlotOpening
from ..contracts.speculator import (
    DraftContext,
    Drafts,
    DraftTarget,
    HeadText,
    Speculator,
    SpeculatorNeed,
    SpeculatorSpec,
)
from ..registry.hookspecs import hookimpl

#: Of the part.
NAME: Final = "collecting"


class _Record:
    """One slot's text: ids, and which of all collected states are those of consecutive tokens, the first of which
    stands at `first`."""

    def __init__(self, opening: SlotOpening) -> None:
        self.ids = [*opening.prompt, *opening.output]
        self.first = 0
        self.states: list[int] = []

    def add(self, place: int, states: Iterable[int]) -> None:
        """From the token at `place` on."""
        if not self.states:
            self.first = place
        self.states += states


class Collected:
    """What was told of every sequence, on the CPU."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._slots: dict[int, _Record] = {}
        #: [N, E], and the target's first choices [N], of each time that it was told of some.
        self._states: list[Tensor] = []
        self._greedy: list[Tensor] = []
        self._count = 0

    def open(self, opening: SlotOpening) -> None:
        self._slots[opening.slot] = _Record(opening)
        self._records.append(self._slots[opening.slot])

    def at(self, slot: int) -> _Record | None:
        """None: an idle slot."""
        return self._slots.get(slot)

    def keep(self, states: Tensor, greedy: Tensor) -> int:
        """Where the first of states [N, E] stands among all."""
        first = self._count
        self._states.append(states.to("cpu", copy=True))
        self._greedy.append(greedy.cpu())
        self._count += len(greedy)
        return first

    def texts(self, least: int, device: str) -> list[HeadText]:
        """Of those of `least` tokens or more with their states."""
        long = [record for record in self._records if len(record.states) + 1 >= least]
        if not long:
            return []
        states, greedy = torch.cat(self._states), torch.cat(self._greedy)
        found = []
        for record in long:
            rows = torch.tensor(record.states)
            ids = record.ids[record.first : record.first + len(rows) + 1]
            found.append(
                HeadText(
                    ids=torch.tensor(ids, device=device),
                    hidden=states[rows].to(device, torch.float32),
                    greedy=greedy[rows].to(device),
                )
            )
        return found


class Collector(Speculator):
    """`collected` is set by `collecting_plugin`."""

    needs_host_token = True
    collected: ClassVar[Collected]

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: Any) -> Sequence[str]:
        return []

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: Any) -> SpeculatorSpec:
        return SpeculatorSpec(drafts=1, hidden="all")

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls()

    def attach(self, target: DraftTarget) -> None:
        self._target = target

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self.collected.open(opening)

    def propose(self, context: DraftContext) -> Drafts:
        return Drafts(ids=torch.full((context.slots.shape[0], 1), -1, device=context.slots.device))

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        for slot, row, kept in zip(slots.tolist(), ids.tolist(), count.tolist(), strict=True):
            record = self.collected.at(slot)
            if record is not None:
                record.ids += row[:kept]

    def observe_hidden(self, slots: Tensor, ids: Tensor, count: Tensor, hidden: Tensor) -> None:
        states = hidden[:, 0]  # one a row, as there are no drafts
        first = self.collected.keep(states, self._choices(states))
        for row, (slot, kept) in enumerate(zip(slots.tolist(), count.tolist(), strict=True)):
            record = self.collected.at(slot)
            if record is not None and kept:
                record.add(len(record.ids) - 2, (first + row,))

    def observe_prompt(self, slot: int, start: int, hidden: Tensor) -> None:
        record = self.collected.at(slot)
        if record is not None:
            first = self.collected.keep(hidden, self._choices(hidden))
            record.add(start, range(first, first + len(hidden)))

    def _choices(self, hidden: Tensor) -> Tensor:
        return torch.cat([self._target.head(part).argmax(-1) for part in torch.split(hidden, 64)])


def collecting_plugin(collected: Collected) -> object:
    """A plugin with the part `NAME`, which writes into `collected`."""
    speculator = type("Collecting", (Collector,), {"collected": collected})

    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> Sequence[Part]:
            return (Part(role="speculator", name=NAME, factory=speculator, summary="collects hidden states"),)

    return Plugin()
