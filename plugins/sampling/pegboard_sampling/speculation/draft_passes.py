"""A draft model's passes over the texts of slots: what it has read of them, and the drafts that stand behind them.

Letters: R rows, k drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import SpeculatorNeed
from pegboard.devices import torch_device
from pegboard.dtypes import torch_dtype
from pegboard.plan import AssemblyPlan
from pegboard.registry.registry import Registry
from pegboard.runner.companion import SPARE, Companion, plan_companion

from .drawing import make_draws
from .history import TokenHistory
from .options import DraftModelOptions

#: Tokens of a prompt that run at a time, and those that a row which fell behind catches up in a step on CUDA, where
#: nobody knows how many it lacks.
_CHUNK, _CATCH_UP = 256, 4


def plan_draft(need: SpeculatorNeed, options: DraftModelOptions) -> tuple[AssemblyPlan, Registry]:
    """max_length beyond the draft's context is refused there."""
    return plan_companion(
        options.model,
        device=options.device or torch_device(need.device),
        dtype=options.dtype,
        slots=need.slots,
        max_length=need.max_length,
        max_query=_CHUNK,
    )


class DraftPasses:
    """Prompts run through the draft model when their slot is opened. `valid` counts the entries of a slot's cache that
    belong to its text; a row that is behind (it had no drafts for a while) catches up first.

    Drafts stay where they are until the text has gone on. If it has gone on as they said, those that are left stand
    behind it, as do their entries: `standing` says how many."""

    def __init__(self, need: SpeculatorNeed, options: DraftModelOptions) -> None:
        plan, registry = plan_draft(need, options)
        self._companion = Companion(plan, registry)
        self.device = torch.device(self._companion.device)
        self._on_cpu = self.device.type == "cpu"
        self.capturable = not self._on_cpu and self._companion.capturable
        self._history = TokenHistory(need.slots, need.max_length, self.device)
        self._draws = make_draws(need, plan.device, torch_dtype(plan.dtype), options.candidates)
        self._valid = torch.zeros(need.slots, dtype=torch.int64, device=self.device)
        #: Twice over, and one between them: what is drafted, and what may be drafted ahead meanwhile.
        self._drafts = torch.zeros(
            need.slots, min(2 * options.drafts + 1, SPARE), dtype=torch.int64, device=self.device
        )
        self._standing = torch.zeros(need.slots, dtype=torch.int64, device=self.device)

    @property
    def most(self) -> int:
        """Drafts of a slot."""
        return self._drafts.shape[1]

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._history.open(openings)
        self._draws.open(openings)
        for opening in openings:
            slot = torch.full((1,), opening.slot, device=self.device)
            length = len(opening.prompt) + len(opening.output) - 1
            for start in range(0, length, _CHUNK):
                width = min(_CHUNK, length - start)
                ids = self._history.tokens[opening.slot, start : start + width].long()
                at = torch.full((1,), start, device=self.device)
                self._companion.forward(slot, at, ids[None], torch.full_like(at, width))
            self._valid[opening.slot] = length
            self._standing[opening.slot] = 0

    def standing(self, slots: Tensor) -> Tensor:
        """[R]: drafts that are there already."""
        return self._standing[slots]

    def standing_ids(self, slots: Tensor, count: int) -> Tensor:
        """[R, count]; -1: none."""
        ids = self._drafts[slots, :count]
        return ids.masked_fill_(torch.arange(count, device=ids.device) >= self._standing[slots][:, None], -1)

    def draft(self, slots: Tensor, count: int) -> Tensor | None:
        """`count` drafts of each row that has caught up. Where it is wanted, what they were drawn from: [R, k, V]."""
        hidden, ready = self._catch_up(slots)
        chosen, distribution = self._choose(slots, hidden, 0)
        self._drafts[:, 0].index_copy_(0, slots, chosen)
        self._standing.index_copy_(0, slots, ready.long())
        more = self.draft_on(slots, 1, count)
        return None if distribution is None else torch.stack([distribution, *more], 1)

    def draft_on(self, slots: Tensor, start: int, stop: int) -> list[Tensor]:
        """Drafts start .. stop - 1 of rows where `start` >= 1 stand; distributions [R, V] of each, where wanted."""
        length, distributions = self._history.lengths[slots], []
        for place in range(start, stop):
            at = length + place - 1
            before = self._drafts[slots, place - 1]
            hidden = self._companion.forward(slots, at, before[:, None], torch.ones_like(at))[:, 0]
            chosen, distribution = self._choose(slots, hidden, place)
            self._drafts[:, place].index_copy_(0, slots, chosen)
            distributions += [] if distribution is None else [distribution]
        standing = self._standing[slots]
        self._standing.index_copy_(0, slots, torch.where(standing >= start, max(start, stop), 0))
        return distributions

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        """As `Speculator.observe`."""
        self._history.append(slots, ids, count)
        drafts, standing = self._drafts[slots], self._standing[slots]
        width = min(ids.shape[1], self.most)
        place = torch.arange(width, device=ids.device)
        said = (ids[:, :width] == drafts[:, :width]) & (place < count.minimum(standing)[:, None])
        right = said.long().cumprod(1).sum(1)
        # The last of the drafts has no entry yet
        self._valid.index_copy_(0, slots, self._valid[slots] + right.minimum((standing - 1).clamp_(min=0)))
        self._standing.index_copy_(0, slots, torch.where(right == count, standing - count, 0))
        following = torch.arange(self.most, device=ids.device) + count[:, None]
        self._drafts.index_copy_(0, slots, drafts.gather(1, following.clamp_(max=self.most - 1)))

    def _choose(self, slots: Tensor, hidden: Tensor, place: int) -> tuple[Tensor, Tensor | None]:
        return self._draws.choose(self._companion.logits(hidden), slots, self._history.lengths[slots] + place)

    def _catch_up(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [R, E] after the last token, and which rows [R] have come so far."""
        length, tokens = self._history.lengths[slots], self._history.tokens
        while True:
            valid = self._valid[slots].minimum(length - 1).clamp_(min=0)
            missing = length - valid
            width = min(int(missing.max()), SPARE) if self._on_cpu else _CATCH_UP
            place = valid[:, None] + torch.arange(width, device=self.device)
            ids = tokens[slots[:, None], place.clamp(max=tokens.shape[1] - 1)].long()
            hidden = self._companion.forward(slots, valid, ids, missing)
            self._valid.index_copy_(0, slots, valid + missing.clamp(max=width))
            ready = missing <= width
            if not self._on_cpu or bool(ready.all()):
                last = (missing - 1).clamp_(min=0, max=width - 1)
                return hidden[torch.arange(slots.shape[0], device=self.device), last], ready
