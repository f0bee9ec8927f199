"""The EAGLE layer's cache on CUDA, attended by kernels."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from .eagle_cache import EntryCache
from .eagle_kernels import attend_entries, turn_and_write

#: Entries that a program reads at a time, and its queries, at most.
_ENTRIES: Final = 64
_QUERIES: Final = 64
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


class FusedEntryCache(EntryCache):
    """The same on CUDA."""

    @staticmethod
    def takes(dtype: torch.dtype, device: torch.device) -> bool:
        return device.type == "cuda" and dtype in _DTYPES and torch.cuda.get_device_capability(device) >= (8, 0)

    def attend(self, qkv: Tensor, slots: Tensor, starts: Tensor, count: Tensor) -> Tensor:
        rows, width, _, size = qkv.shape
        shared = self.keys.shape[2]
        heads, rope = qkv.shape[2] - 2 * shared, self.layer.rope
        turned = torch.empty(rows, width, heads, size, dtype=qkv.dtype, device=qkv.device)
        mixed = torch.empty_like(turned)
        shape: dict[str, Any] = {"HEADS": heads, "SHARED": shared, "SIZE": size}
        block = max(16, triton.next_power_of_2(size))
        turn_and_write[(rows * width, heads + 2 * shared)](
            qkv,
            turned,
            self.keys,
            self.values,
            rope.cos,
            rope.sin,
            slots,
            starts,
            count,
            width,
            self.entries,
            **shape,
            TURNING=2 * rope.cos.shape[1],
            INTERLEAVED=rope.interleaved,
            BLOCK=block,
            num_warps=1,
        )
        queries = min(_QUERIES, max(16, triton.next_power_of_2(width * (heads // shared))))
        attend_entries[(rows, shared, triton.cdiv(width * (heads // shared), queries))](
            turned,
            self.keys,
            self.values,
            mixed,
            slots,
            starts,
            self.base,
            size**-0.5,
            width,
            self.entries,
            **shape,
            BLOCK=block,
            QUERIES=queries,
            ENTRIES=_ENTRIES,
            num_warps=4,
        )
        return mixed
