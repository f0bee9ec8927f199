"""Bits of tokens, from the host to the logits."""

from __future__ import annotations

import torch
from torch import Tensor


class Bitmask:
    """For a vocabulary of V tokens: W = ceil(V / 32) words a row. What it keeps on a device is made at first use."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: tuple[Tensor, Tensor] | None = None

    def host(self, rows: int, pinned: bool) -> Tensor:
        """[rows, W] int32, all 0."""
        return torch.zeros(rows, -(-self._vocab_size // 32), dtype=torch.int32, pin_memory=pinned)

    def apply(self, logits: Tensor, mask: Tensor) -> None:
        """-inf in place to logits [rows, V] whose bit is 0. Does not wait for the device: mask is pinned for CUDA."""
        if self._places is None or self._places[0].device != logits.device:
            ids = torch.arange(self._vocab_size, device=logits.device)
            self._places = ids // 32, (ids % 32).to(torch.int32)
        word, bit = self._places
        held = mask.to(logits.device, non_blocking=True)
        logits.masked_fill_((held[:, word] >> bit) & 1 == 0, -torch.inf)
