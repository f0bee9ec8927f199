"""What the EAGLE layer keeps of each slot: keys and values of its entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.contracts.sampler import SlotOpening

from .eagle_layer import EagleLayer, attend_where


class EntryCache:
    """keys and values [slots, entries, K, D]; base [slots] int64, the first entry that a slot has: a prompt's prefix
    that the target did not run, because it was cached, has none. The last entry is for what belongs nowhere.

    Here in plain torch. On CUDA every entry that a slot may have is looked at, so that the work depends on no length;
    on a CPU those in use."""

    def __init__(self, layer: EagleLayer, slots: int, entries: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layer, self.entries = layer, entries
        size = (slots, entries, layer.config.kv_heads, layer.config.head_size)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.base = torch.zeros(slots, dtype=torch.int64, device=device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        """Entries of a text's prefix may follow; that of its last token but one is told with the next one."""
        for opening in openings:
            self.base[opening.slot] = len(opening.prompt) + len(opening.output) - 1

    def begin(self, slot: int, start: int) -> None:
        """Entries from `start` on follow."""
        self.base[slot].clamp_(max=start)

    def attend(self, qkv: Tensor, slots: Tensor, starts: Tensor, count: Tensor) -> Tensor:
        """qkv [R, w, H + 2 K, D] of entries that begin at starts [R], not turned yet -> [R, w, H, D]. The first `count`
        [R] of each row are written; the others give anything."""
        step = torch.arange(qkv.shape[1], device=qkv.device)
        places = starts[:, None] + step
        inside = step < count[:, None]
        q, k, v = self.layer.turned(qkv, places.clamp(max=self.entries - 1))
        index = (
            slots[:, None].expand_as(places),
            torch.where(inside, places, self.entries - 1).clamp_(max=self.entries - 1),
        )
        for kept, new in ((self.keys, k), (self.values, v)):
            kept.index_put_(index, torch.where(inside[..., None, None], new, 0))  # beyond them it may be NaN
        reach = self._reach(starts, qkv.shape[1])
        seen = torch.arange(reach, device=qkv.device)
        visible = (seen <= places[..., None]) & (seen >= self.base[slots][:, None, None])
        visible = visible | (seen == places[..., None])  # nobody sees nothing: its row would be NaN
        return attend_where(q, self.keys[slots, :reach], self.values[slots, :reach], visible)

    def _reach(self, starts: Tensor, width: int) -> int:
        """Entries that must be looked at."""
        if starts.device.type != "cpu":
            return self.entries
        return min(int(starts.max()) + width, self.entries)
