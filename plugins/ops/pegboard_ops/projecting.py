"""The matrix product of one row, with the norm before it and activation and residual after it in the same launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .gating import activate

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.contracts.ops import Activation, Norm

    from .launching import Launcher

#: Numbers of a program's weights that stay in registers: 128 of them a thread.
_HELD = 128 * 256


@triton.jit
def load_chunk(vector_ptr, k, INPUTS: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        chunk = tl.load(vector_ptr + k)
    else:
        chunk = tl.load(vector_ptr + k, mask=k < INPUTS, other=0.0)
    return chunk.to(tl.float32)


@triton.jit
def project_row(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    features,
    eps,
    offset,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program makes BLOCK outputs: all its weights are asked for before it waits for x, so that they come while the
    kernel before ends. 1 / rms multiplies the sums, whose squares are gathered beside them: x is read once.

    With ACTIVATION half of the block's rows are gates and half the matching ups; `features` counts outputs."""
    program = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    k = tl.arange(0, CHUNK)
    HALF: tl.constexpr = BLOCK // 2
    if ACTIVATION is None:
        out = program * BLOCK + r
        row = out
    else:
        out = program * HALF + r % HALF
        row = out + r // HALF * features
    there = out < features
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at = weight_ptr + row.to(tl.int64)[:, None] * INPUTS + k[None, :]
    weights = ()
    for c in tl.static_range(CHUNKS):
        if EVEN:
            part = tl.load(at + c * CHUNK, eviction_policy="evict_first")
        else:
            inside = (c * CHUNK + k < INPUTS)[None, :] & there[:, None]
            part = tl.load(at + c * CHUNK, mask=inside, other=0.0, eviction_policy="evict_first")
        weights = weights + (part,)  # type: ignore[assignment]  # noqa: RUF005 - triton knows no stars
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK, CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    for c in tl.static_range(CHUNKS):
        x = load_chunk(x_ptr, c * CHUNK + k, INPUTS, EVEN)
        if NORM:
            squares += x * x
            x *= load_chunk(norm_ptr, c * CHUNK + k, INPUTS, EVEN) + offset
        sums += weights[c].to(tl.float32) * x[None, :]
    y = tl.sum(sums, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        gate, up = tl.split(tl.trans(tl.reshape(y, [2, HALF])))
        y = activate(gate, ACTIVATION) * up
        out = program * HALF + tl.arange(0, HALF)
        there = out < features
    if RESIDUAL:
        y += tl.load(residual_ptr + out, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + out, y.to(out_ptr.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class RowShape:
    chunk: int
    chunks: int
    #: Rows of the weight a program takes
    block: int


def row_shape(outputs: int, inputs: int, paired: bool) -> RowShape | None:
    """How one row's product is cut, or None where this kernel is not made for it: its weights would not fit registers.

    Measured on an H200: chunks of 1024 numbers, of 2048 for long rows; four rows at a time where they are short and
    many, else two. For 1024 outputs of 3072 inputs (2.23 us) twelve other cuts were slower: chunks of 256 and 512, one
    and four rows, one to eight warps."""
    if inputs % 8:
        return None
    chunk = 2048 if inputs > 8192 else min(1024, max(128, triton.next_power_of_2(inputs)))
    chunks = triton.cdiv(inputs, chunk)
    block = 4 if paired or (inputs <= 4096 and outputs >= 2048) else 2
    while block > (2 if paired else 1) and block * chunk * chunks > _HELD:
        block //= 2
    return RowShape(chunk, chunks, block) if block * chunk * chunks <= _HELD else None


def launch_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
    shape: RowShape,
    launcher: Launcher,
) -> Tensor:
    """x [1, I] dense, weight [O, I] dense -> residual + act(norm(x) W^T + bias), [1, O] or [1, O / 2].

    Reference: `pegboard.ops.TorchOps.project`. Nothing is rounded before the result, so it is nearer to exact than the
    reference: within one unit in the last place of x's dtype, and of float32 sums over I. Bytes: the weight once."""
    outputs, inputs = weight.shape
    features = outputs if activation is None else outputs // 2
    made = shape.block if activation is None else shape.block // 2
    out = x.new_empty(1, features)
    project_row[(triton.cdiv(features, made),)](
        x,
        None if norm is None else norm.weight,
        weight,
        bias,
        residual,
        out,
        features,
        1.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.offset,
        INPUTS=inputs,
        CHUNK=shape.chunk,
        CHUNKS=shape.chunks,
        BLOCK=shape.block,
        NORM=norm is not None,
        BIAS=bias is not None,
        ACTIVATION=activation,
        RESIDUAL=residual is not None,
        EVEN=inputs % shape.chunk == 0 and features % made == 0,
        PDL=launcher.pdl,
        num_warps=4,
        **launcher.options,
    )
    return out


def added(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual + x W^T by cuBLAS, which adds in its epilogue and rounds once, into the residual."""
    return residual.addmm_(x, weight.t())
