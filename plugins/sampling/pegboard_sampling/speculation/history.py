"""What speculators remember of each slot: its tokens, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.contracts.sampler import SlotOpening


class TokenHistory:
    """tokens [slots, max_length + 1] int32, the last column for what belongs nowhere; lengths [slots] int64."""

    def __init__(self, slots: int, max_length: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, max_length + 1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)

    @staticmethod
    def bytes_for(slots: int, max_length: int) -> int:
        return slots * (4 * (max_length + 1) + 8)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        """Prompt and output of each slot; whatever was there is gone."""
        for opening in openings:
            tokens = (*opening.prompt, *opening.output)
            self.tokens[opening.slot, : len(tokens)].copy_(self._upload(tokens, torch.int32), non_blocking=True)
        slots = self._upload([opening.slot for opening in openings], torch.int64)
        lengths = self._upload([len(opening.prompt) + len(opening.output) for opening in openings], torch.int64)
        self.lengths.index_copy_(0, slots, lengths)

    def append(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        """The first count [R] of ids [R, m] for slots [R]."""
        step = torch.arange(ids.shape[1], device=ids.device)
        before, nowhere = self.lengths[slots], self.tokens.shape[1] - 1
        place = torch.where(step < count[:, None], before[:, None] + step, nowhere).clamp_(max=nowhere)
        self.tokens.index_put_((slots[:, None].expand_as(place), place), ids.to(torch.int32))
        self.lengths.index_copy_(0, slots, (before + count).clamp_(max=nowhere))

    def _upload(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Without waiting for the device."""
        host = torch.tensor(values, dtype=dtype)
        return host.pin_memory().to(self.tokens.device, non_blocking=True) if self.tokens.is_cuda else host
