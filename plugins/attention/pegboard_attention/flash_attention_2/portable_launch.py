"""Launches the portable kernel."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .portable import portable_forward
from .problem import Forward
from .tiling import padded_width


def launch(call: Forward) -> None:
    entries, q = call.entries, _last_contiguous(call.q)
    k, v, k_scale, v_scale = entries.k, entries.v, entries.k_scale, entries.v_scale
    if k_scale is None:
        k, v = _last_contiguous(k), _last_contiguous(v)
    portable_forward[(call.schedule.limit * call.groups,)](
        q,
        k,
        v,
        call.out,
        *call.tensors(),
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        *call.numbers(),
        k_scale,
        v_scale,
        0 if k_scale is None else k_scale.stride(0),
        0 if k_scale is None else k_scale.stride(2),
        **call.constants(),
        ROWS=call.tiling.rows,
        WIDTH=padded_width(call.mixing.head_size),
        FORMAT=entries.format,
        ASSEMBLY=not triton.knobs.runtime.interpret,
        num_stages=call.tiling.stages,
    )


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
