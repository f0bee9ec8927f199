"""The matrix product of 2 to 64 rows over few inputs, with norm, activation and residual in the same launch.

A decoder layer of a small model is a chain of products that each take a microsecond or two to read: what a step costs
is the way from one product's end to the next one's. So a program asks for all its weights before it waits for x."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pegboard.contracts.ops import Activation, Norm

from .held_rows import CHUNK, project_held
from .launching import Launcher

#: Outputs from which the programs are enough to ask for much at once
_LEAST_OUTPUTS = 512
#: Outputs of which a program takes 32 instead of 16, of up to _SHORT inputs: half as many programs read x, and they
#: leave more room for the next kernel's.
_WIDE = range(4096, 8193)
_SHORT = 1024
#: Rows of x that a program takes -> the warps that it may have, the best first where they hold what they must; chunks
#: of x that it asks for at once; outputs up to which this kernel is ahead on an H200, as every program reads x.
_CUTS = {8: ((4, 8), 6, 1 << 20), 16: ((4, 16, 8), 6, 8192), 32: ((4, 8), 2, 8192), 64: ((8,), 1, 2048)}
#: Most outputs of more inputs than _SHORT, of which a multiprocessor holds only one or two programs
_MOST_OF_LONG = 4096
#: Chunks of a warp's weights: 16 registers each
_MOST_CHUNKS = 6


@dataclass(frozen=True)
class HeldShape:
    #: Rows of the weight a program takes, and of x: 8, 16, 32 or 64
    block_n: int
    block_m: int
    warps: int
    #: Chunks of x that are asked for at once
    ahead: int
    #: Most registers of a thread: what leaves a multiprocessor room for the next kernel's programs
    registers: int | None = None


def held_shape(rows: int, outputs: int, inputs: int) -> HeldShape | None:
    """How the product of 2 or more rows is cut, or None where this kernel is not made for it."""
    block_m = max(8, triton.next_power_of_2(rows))
    many, ahead, most = _CUTS.get(block_m, ((), 0, 0))
    if not _LEAST_OUTPUTS <= outputs <= (most if inputs <= _SHORT else min(most, _MOST_OF_LONG)):
        return None
    for warps in many:
        chunks, left = divmod(inputs, warps * CHUNK.value)
        if left or not 0 < chunks <= (3 if warps == 16 else _MOST_CHUNKS):
            continue
        if inputs <= _SHORT and outputs in _WIDE:
            return HeldShape(32, block_m, warps, min(chunks, ahead) if block_m <= 16 else 1)
        registers = 128 if block_m == 8 and warps == 4 and chunks <= 4 else None
        return HeldShape(16, block_m, warps, min(chunks, ahead), registers)
    return None


def can_norm(x: Tensor, norm: Norm | None) -> bool:
    """Whether the norm may join the product: float16 may not hold x times the norm's weight, and of many rows the norm
    takes more registers than there are."""
    return norm is None or (x.dtype == torch.bfloat16 and x.shape[0] <= 32)


def launch_held(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: Tensor | None,
    shape: HeldShape,
    launcher: Launcher,
) -> Tensor:
    """x [T, I], T at most 64, weight [O, I], both dense -> residual + act(norm(x) W^T + bias), [T, O] or [T, O / 2].

    Reference: `pegboard.ops.TorchOps.project`. x times the norm's weight is rounded once, nothing else before the
    result: within a unit in the last place of x's dtype, and of float32 sums over I. Bytes: the weight once."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    features = outputs if activation is None else outputs // 2
    made = shape.block_n if activation is None else shape.block_n // 2
    out = x.new_empty(rows, features)
    project_held[(triton.cdiv(features, made),)](
        x,
        None if norm is None else norm.weight,
        weight,
        bias,
        residual,
        out,
        rows,
        features,
        1.0 if norm is None else norm.eps,
        0.0 if norm is None else norm.offset,
        INPUTS=inputs,
        BLOCK_N=shape.block_n,
        BLOCK_M=shape.block_m,
        AHEAD=shape.ahead,
        NORM=norm is not None,
        BIAS=bias is not None,
        ACTIVATION=activation,
        RESIDUAL=residual is not None,
        PDL=launcher.pdl,
        num_warps=shape.warps,
        maxnreg=shape.registers,
        **launcher.options,
    )
    return out
