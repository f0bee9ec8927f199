"""A speculator that proposes nothing, and writes down the hidden states that it is told."""

from __future__ import annotations

from collections.abc import Sequence
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
    """One slot's text: ids, and states of consecutive tokens, the first of which stands at `first`."""

    def __init__(self, opening: SlotOpening) -> None:
        self.ids = [*opening.prompt, *opening.output]
        self.first = 0
        self.states: list[Tensor] = []
        self.greedy: list[Tensor] = []

    def add(self, place: int, states: Tensor, greedy: Tensor) -> None:
        """States [N, E] and choices [N] from the token at `place` on."""
        if not self.states:
            self.first = place
        self.states.append(states)
        self.greedy.append(greedy)


class Collected:
    """What was told of every sequence, on the CPU."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._slots: dict[int, _Record] = {}

    def open(self, opening: SlotOpening) -> None:
        self._slots[opening.slot] = _Record(opening)
        self._records.append(self._slots[opening.slot])

    def at(self, slot: int) -> _Record | None:
        """None: an idle slot."""
        return self._slots.get(slot)

    def texts(self, least: int, device: str) -> list[HeadText]:
        """Of those of `least` tokens or more with their states."""
        found = []
        for record in self._records:
            count = sum(len(states) for states in record.states)
            if count + 1 >= least:
                ids = record.ids[record.first : record.first + count + 1]
                found.append(
                    HeadText(
                        ids=torch.tensor(ids, device=device),
                        hidden=torch.cat(record.states).to(device, torch.float32),
                        greedy=torch.cat(record.greedy).to(device),
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
        states, greedy = hidden[:, 0].cpu(), self._choices(hidden[:, 0])
        for row, (slot, kept) in enumerate(zip(slots.tolist(), count.tolist(), strict=True)):
            record = self.collected.at(slot)
            if record is not None and kept:  # one, as there are no drafts
                record.add(len(record.ids) - 2, states[row : row + 1].clone(), greedy[row : row + 1])

    def observe_prompt(self, slot: int, start: int, hidden: Tensor) -> None:
        record = self.collected.at(slot)
        if record is not None:
            record.add(start, hidden.cpu().clone(), self._choices(hidden))

    def _choices(self, hidden: Tensor) -> Tensor:
        return torch.cat([self._target.head(part).argmax(-1).cpu() for part in torch.split(hidden, 64)])


def collecting_plugin(collected: Collected) -> object:
    """A plugin with the part `NAME`, which writes into `collected`."""
    speculator = type("Collecting", (Collector,), {"collected": collected})

    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> Sequence[Part]:
            return (Part(role="speculator", name=NAME, factory=speculator, summary="collects hidden states"),)

    return Plugin()
