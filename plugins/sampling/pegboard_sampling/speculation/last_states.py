"""The state that each slot's next draft starts from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.contracts.sampler import SlotOpening


class LastStates:
    """[slots, E] in `dtype`; a slot that was opened has none until one is kept."""

    def __init__(self, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._states = torch.zeros(slots, size, dtype=dtype, device=device)
        #: States that each slot was told since it was opened.
        self._told = torch.zeros(slots, dtype=torch.int64, device=device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self._told[opening.slot] = 0

    def keep(self, slots: Tensor, states: Tensor, count: Tensor) -> None:
        """The last of the first count [R] of states [R, m, E]; a row without any keeps what it had."""
        kept = count > 0
        last = states[torch.arange(slots.shape[0], device=slots.device), (count - 1).clamp(min=0)]
        self._states.index_copy_(0, slots, torch.where(kept[:, None], last, self._states[slots]))
        self._told.index_add_(0, slots, count)

    def of(self, slots: Tensor) -> Tensor:
        """[R, E]"""
        return self._states[slots]

    def without_unknown(self, slots: Tensor, ids: Tensor) -> Tensor:
        """ids [R, k], -1 in rows that have no state yet."""
        return ids.masked_fill(self._told[slots][:, None] == 0, -1)
