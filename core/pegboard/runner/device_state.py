"""Per-slot state on the device: page tables, true lengths, last tokens. The runner is its only owner.

Everything is indexed by slot, so that a step names rows by slot and the device can feed itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
import torch
from torch import Tensor

from pegboard.contracts.cache import CacheGroup
from pegboard.contracts.scheduler import SlotPages


class DraftTrees:
    """Of each draft in `DeviceState.drafts` its parent (see `Drafts.parents`), how many drafts lead to it, itself
    counted, and its ancestors among the queries of its row, as bits: the last token is query 0, draft i query 1 + i."""

    def __init__(self, drafts: Tensor) -> None:
        self.parents, self.depths = torch.zeros_like(drafts), torch.ones_like(drafts)
        self.ancestors = torch.ones_like(drafts)

    def put(self, slots: Tensor, parents: Tensor) -> None:
        """parents [R, k] of the slots' next drafts."""
        first = torch.ones_like(slots)
        ancestors, depths = [first], [torch.zeros_like(slots)]
        for draft in range(parents.shape[1]):
            parent = parents[:, draft : draft + 1]
            ancestors.append(torch.stack(ancestors, 1).gather(1, parent)[:, 0] | 1 << (draft + 1))
            depths.append(torch.stack(depths, 1).gather(1, parent)[:, 0] + 1)
        places = torch.arange(parents.shape[1], device=parents.device)
        at = (slots[:, None], places)
        self.parents.index_put_(at, parents)
        self.depths.index_put_(at, torch.stack(depths[1:], 1))
        self.ancestors.index_put_(at, torch.stack(ancestors[1:], 1))


class DeviceState:
    """Tables [slots + 1, P] int32 a group; dropped [slots + 1] a group; lengths and last_ids [slots + 1] int64;
    drafts [slots + 1, k] int64, and how they hang together where they are trees.

    The last slot, `idle`, is of rows that only fill a step up: it stays empty, and its pages are the null page."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        slots: int,
        max_length: int,
        page_size: int,
        decode_width: int,
        device: str,
        trees: bool = False,
    ) -> None:
        self.page_size = page_size
        self.groups = tuple(groups)
        self.idle = slots
        # Padded rows of a verify step reach beyond the longest text, into the null page
        pages = -(-(max_length + decode_width - 1) // page_size)
        self.device = torch.device(device)
        # A recurrent state has one page, and one more for each draft of a verify step.
        widths = [decode_width if group.kind == "state" else pages for group in groups]
        self.tables = [torch.zeros(slots + 1, width, dtype=torch.int32, device=device) for width in widths]
        #: Entries that the cache manager dropped: entry = position - dropped.
        self.dropped = [torch.zeros(slots + 1, dtype=torch.int64, device=device) for _ in groups]
        #: The same on the host, by slot; 0 where nothing stands.
        self._host_dropped: list[dict[int, int]] = [{} for _ in groups]
        #: True number of tokens whose K/V is written.
        self.lengths = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.last_ids = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        #: What was proposed for the step that runs; -1: nothing.
        self.drafts = torch.full((slots + 1, decode_width - 1), -1, dtype=torch.int64, device=device)
        self.trees = DraftTrees(self.drafts) if trees else None
        #: 0, 1, 2, ...: where each row's query starts when each has one.
        self.counting = torch.arange(slots + 2, dtype=torch.int32, device=device)

    def apply(self, updates: Sequence[SlotPages]) -> None:
        """Write the page ids that changed, and dropped entries where they did."""
        for group, table in enumerate(self.tables):
            ours = [u for u in updates if u.group == group]
            if not ours:
                continue
            width = table.shape[1]
            # A later update of the same place wins; a scatter with duplicates would leave that open.
            self._scatter(
                table.view(-1),
                {u.slot * width + u.start + i: page for u in ours for i, page in enumerate(u.pages)},
            )
            known = self._host_dropped[group]
            dropped = {u.slot: u.dropped for u in ours}
            changed = {slot: count for slot, count in dropped.items() if known.get(slot, 0) != count}
            self._scatter(self.dropped[group], changed)
            known.update(changed)

    def place(self, group: int, slots: Tensor, positions: Tensor) -> Tensor:
        """[N, W] flat entries of positions [N, W] of slots [N]."""
        table = self.tables[group]
        entries = (positions - self.dropped[group][slots][:, None]).clamp_(min=0)
        pages = table[slots[:, None], (entries // self.page_size).clamp_(max=table.shape[1] - 1)].long()
        return pages * self.page_size + entries % self.page_size

    def upload(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host list as a device tensor, without waiting for the device."""
        return self._upload(torch.tensor(values, dtype=dtype))

    def _upload(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _scatter(self, target: Tensor, values: Mapping[int, int]) -> None:
        """One upload, the values in the target's own dtype behind the places, and one write."""
        count = len(values)
        if not count:
            return
        own = numpy.dtype(str(target.dtype).removeprefix("torch."))
        numbers = numpy.zeros(2 * count, dtype=numpy.int64)
        numbers[:count] = list(values)
        numbers[count:].view(own)[:count] = list(values.values())
        uploaded = self._upload(torch.from_numpy(numbers))
        target.index_copy_(0, uploaded[:count], uploaded[count:].view(target.dtype)[:count])

    @property
    def nbytes(self) -> int:
        tensors = [*self.tables, *self.dropped, self.lengths, self.last_ids, self.drafts, self.counting]
        return sum(tensor.nbytes for tensor in tensors) + (0 if self.trees is None else 3 * self.drafts.nbytes)
