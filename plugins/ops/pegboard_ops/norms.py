"""RMS norm, with the residual added in the same launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.contracts.ops import Norm

    from .launching import Launcher

#: Rows up to which the next kernel may start before the one before this has ended. Measured on an H200: with 4-bit
#: weights steps of 1 and 2 rows take 1 to 2% less, with 4 to 16 1 to 5% more.
_EARLY_ROWS = 2


@triton.jit
def rms_norm(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    rows,
    x_row,
    residual_row,
    eps,
    offset,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program holds ROWS whole rows in registers: one read of x, one of the residual, one write of out."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    there = (r < rows)[:, None] & (e < E)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + (r * x_row)[:, None] + e[None, :], mask=there, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + (r * residual_row)[:, None] + e[None, :], mask=there, other=0.0)
    weight = tl.load(weight_ptr + e, mask=e < E, other=0.0)
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    wide = x.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 1) / E + eps)[:, None]
    if ROUND_FIRST:
        rounded = (weight + offset).to(weight.dtype).to(x.dtype).to(tl.float32)
        out = (rounded[None, :] * scaled.to(x.dtype).to(tl.float32)).to(x.dtype)
    else:
        out = (scaled * (offset + weight.to(tl.float32))[None, :]).to(x.dtype)
    if RESIDUAL:
        out = (residual.to(tl.float32) + out.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + (r * E)[:, None] + e[None, :], out, mask=there)


def launch_norm(x: Tensor, norm: Norm, residual: Tensor | None, launcher: Launcher) -> Tensor:
    """x [..., E] with dense last dimension -> norm(x) + residual, dense.

    Reference: `pegboard.ops.TorchOps.norm`, of which it repeats every rounding; the sum of squares is added up in
    another order, so results differ by at most one unit in the last place of x's dtype before weight and residual.
    Bytes: x, residual and out once each."""
    rows = x.flatten(0, -2)
    added = None if residual is None else residual.flatten(0, -2)
    out = rows.new_empty(rows.shape)
    count, size = rows.shape
    block = triton.next_power_of_2(size)
    # Some eight numbers a thread and step; several rows a program where rows are short
    together = max(1, min(8, 2048 // block)) if count > 1024 else 1
    rms_norm[(triton.cdiv(count, together),)](
        rows,
        norm.weight,
        added,
        out,
        count,
        rows.stride(0),
        0 if added is None else added.stride(0),
        norm.eps,
        norm.offset,
        E=size,
        BLOCK=block,
        ROWS=together,
        ROUND_FIRST=norm.round_first,
        RESIDUAL=residual is not None,
        PDL=launcher.pdl,
        EARLY=launcher.pdl and count <= _EARLY_ROWS,
        num_warps=max(1, min(16, block * together // 512)),
        **launcher.options,
    )
    return out.view(x.shape)
