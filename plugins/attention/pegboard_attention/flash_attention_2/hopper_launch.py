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
    mixing, entries, q = call.mixing, call.entries, _aligned(call.q)
    sizes = call.tiling
    heads = mixing.packed_heads(sizes.rows)
    block, width = sizes.block, max(64, padded_width(mixing.head_size))
    groups = mixing.query_heads // heads
    page_size = entries.page_size
    scale, pre_scale = mixing.exponents
    q_box = [_GROUP_ROWS // heads, heads, width]
    kv_box = [1, min(page_size or block, block), 1, width]
    placeholder = call.schedule.count
    table = placeholder if entries.table is None else entries.table
    processors = _processors(q.device.index or 0)
    hopper_forward[(min(processors, call.schedule.limit * groups),)](
        _descriptor(q, q_box),
        _descriptor(entries.k, kv_box),
        _descriptor(entries.v, kv_box),
        _descriptor(call.out, q_box),
        call.out,
        placeholder if call.lse is None else call.lse,
        placeholder if call.sinks is None else call.sinks,
        table,
        placeholder if entries.starts is None else entries.starts,
        call.schedule.tiles,
        call.schedule.count,
        table.stride(0),
        q.shape[0],
        scale,
        pre_scale,
        mixing.reach,
        groups,
        groups // mixing.kv_heads,
        BLOCK=block,
        PAGE=page_size,
        STAGES=sizes.stages,
        HEADS=heads,
        CAUSAL=mixing.causal,
        WINDOW=mixing.window is not None,
        SOFTCAP=mixing.softcap is not None,
        SINKS=call.sinks is not None,
        LSE=call.lse is not None,
        HEAD_SIZE=mixing.head_size,
        PRODUCER_REGISTERS=24,
        CONSUMER_REGISTERS=240,
        num_warps=sizes.warps,
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
