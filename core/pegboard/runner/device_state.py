"""Per-slot state on the device: page tables, true lengths, last tokens. The runner is its only owner.

Everything is indexed by slot, so that a step names rows by slot and the device can feed itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.contracts.cache import CacheGroup
from pegboard.contracts.scheduler import SlotPages


class DeviceState:
    """Tables [slots, P] int32 a group; dropped [slots] a group; lengths and last_ids [slots] int64."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        slots: int,
        max_length: int,
        page_size: int,
        decode_width: int,
        device: str,
    ) -> None:
        self.page_size = page_size
        self.groups = tuple(groups)
        pages = -(-max_length // page_size)
        self.device = torch.device(device)
        # A recurrent state has one page, and one more for each draft of a verify step.
        widths = [decode_width if group.kind == "state" else pages for group in groups]
        self.tables = [torch.zeros(slots, width, dtype=torch.int32, device=device) for width in widths]
        #: Entries that the cache manager dropped: entry = position - dropped.
        self.dropped = [torch.zeros(slots, dtype=torch.int64, device=device) for _ in groups]
        #: True number of tokens whose K/V is written.
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.last_ids = torch.zeros(slots, dtype=torch.int64, device=device)

    def apply(self, updates: Sequence[SlotPages]) -> None:
        """Write the page ids that changed; one scatter a group."""
        for group, table in enumerate(self.tables):
            ours = [u for u in updates if u.group == group]
            if not ours:
                continue
            width = table.shape[1]
            # A later update of the same place wins; a scatter with duplicates would leave that open.
            pages = {u.slot * width + u.start + i: page for u in ours for i, page in enumerate(u.pages)}
            dropped = {u.slot: u.dropped for u in ours}
            _scatter(self, table.view(-1), pages)
            _scatter(self, self.dropped[group], dropped)

    def upload(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host list as a device tensor, without waiting for the device."""
        tensor = torch.tensor(values, dtype=dtype)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


def _scatter(state: DeviceState, target: Tensor, values: Mapping[int, int]) -> None:
    index = state.upload(list(values), torch.int64)
    target.index_copy_(0, index, state.upload(list(values.values()), target.dtype))
