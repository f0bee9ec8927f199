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
        self._known = torch.zeros(slots, dtype=torch.bool, device=device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self._known[opening.slot] = False

    def keep(self, slots: Tensor, states: Tensor, count: Tensor) -> None:
        """The last of the first count [R] of states [R, m, E]; a row without any keeps what it had."""
        kept = count > 0
        last = states[torch.arange(slots.shape[0], device=slots.device), (count - 1).clamp(min=0)]
        self._states.index_copy_(0, slots, torch.where(kept[:, None], last, self._states[slots]))
        self._known.index_copy_(0, slots, kept | self._known[slots])

    def of(self, slots: Tensor) -> Tensor:
        """[R, E]"""
        return self._states[slots]

    def without_unknown(self, slots: Tensor, ids: Tensor) -> Tensor:
        """ids [R, k], -1 in rows that have no state yet."""
        return ids.masked_fill(~self._known[slots][:, None], -1)
