"""Launches the Hopper kernel: what it serves, its tiles, and the descriptors of what it copies."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper import hopper_forward
from .problem import Forward
from .tiling import padded_width

_GROUP_ROWS = 64


def launch(call: Forward) -> None:
    entries, q = call.entries, _aligned(call.q)
    block, width = call.tiling.block, max(64, padded_width(call.mixing.head_size))
    q_box = [_GROUP_ROWS // call.heads, call.heads, width]
    kv_box = [1, min(entries.page_size or block, block), 1, width]
    processors = _processors(q.device.index or 0)
    hopper_forward[(min(processors, call.schedule.limit * call.groups),)](
        _descriptor(q, q_box),
        _descriptor(entries.k, kv_box),
        _descriptor(entries.v, kv_box),
        _descriptor(call.out, q_box),
        call.out,
        *call.tensors(),
        *call.numbers(),
        **call.constants(),
        STAGES=call.tiling.stages,
        PRODUCER_REGISTERS=24,
        CONSUMER_REGISTERS=240,
        maxnreg=168,
    )


def _aligned(x: Tensor) -> Tensor:
    """Bulk copies want 16 bytes."""
    fits = x.stride(-1) == 1 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    return x if fits and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _descriptor(x: Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, _layout(len(box)))


@cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
