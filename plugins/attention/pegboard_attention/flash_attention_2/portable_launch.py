"""Launches the portable kernel."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .portable import portable_forward
from .problem import Forward
from .tiling import padded_width


def launch(call: Forward) -> None:
    mixing, entries, q = call.mixing, call.entries, _last_contiguous(call.q)
    k, v, k_scale, v_scale = entries.k, entries.v, entries.k_scale, entries.v_scale
    if k_scale is None:
        k, v = _last_contiguous(k), _last_contiguous(v)
    sizes = call.tiling
    heads = mixing.packed_heads(sizes.rows)
    groups = mixing.query_heads // heads
    scale, pre_scale = mixing.exponents
    placeholder = call.schedule.count
    table = placeholder if entries.table is None else entries.table
    portable_forward[(call.schedule.limit * groups,)](
        q,
        k,
        v,
        call.out,
        placeholder if call.lse is None else call.lse,
        placeholder if call.sinks is None else call.sinks,
        table,
        placeholder if entries.starts is None else entries.starts,
        call.schedule.tiles,
        call.schedule.count,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        table.stride(0),
        q.shape[0],
        scale,
        pre_scale,
        mixing.reach,
        groups,
        groups // mixing.kv_heads,
        k_scale,
        v_scale,
        0 if k_scale is None else k_scale.stride(0),
        0 if k_scale is None else k_scale.stride(2),
        ROWS=sizes.rows,
        BLOCK=sizes.block,
        PAGE=entries.page_size,
        WIDTH=padded_width(mixing.head_size),
        HEADS=heads,
        CAUSAL=mixing.causal,
        WINDOW=mixing.window is not None,
        SOFTCAP=mixing.softcap is not None,
        SINKS=call.sinks is not None,
        LSE=call.lse is not None,
        HEAD_SIZE=mixing.head_size,
        FORMAT=entries.format,
        ASSEMBLY=not triton.knobs.runtime.interpret,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
