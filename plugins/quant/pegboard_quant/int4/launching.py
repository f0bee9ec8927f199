"""Which kernel multiplies how many rows, and how its work is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from .kernels import dequantise_tiles, multiply_rows
from .layout import TILE, TiledWeight

#: Rows from which the weight is dequantised once and cuBLAS multiplies.
DENSE_ROWS: Final = 257
_SCALES: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
#: Programs up to which sums are split.
_PROGRAMS: Final = 440
#: (outputs, inputs) -> up to so many rows: outputs a program, programs a sum. Measured on an H200, group 128.
_MEASURED: Final = {
    (6144, 4096): {16: (64, 4), 64: (64, 4)},
    (28672, 4096): {16: (128, 1), 64: (128, 1)},
    (4096, 14336): {16: (64, 8), 64: (128, 7)},
}


@dataclass(frozen=True)
class Cut:
    """Outputs and rows that a program takes, programs that share each sum, and tiles that are asked for ahead."""

    block_n: int
    block_m: int
    split: int
    stages: int


def cut_of(rows: int, outputs: int, inputs: int, group: int, *, hopper: bool) -> Cut:
    """What was measured, or by the rule that it suggests. Before Hopper, whose products take x from shared memory, more
    than 32 rows of it don't fit into registers beside the weight; 128 outputs of short groups neither."""
    wide = hopper and group >= TILE
    block_m = min(64 if hopper else 32, max(16, triton.next_power_of_2(rows)))
    stages = 4 if block_m == 16 else 3
    for most, (block_n, split) in _MEASURED.get((outputs, inputs), {}).items():
        if wide and rows <= most:
            return Cut(block_n, block_m, split, stages)
    block_n = 128 if wide and outputs >= 8192 else 64
    programs = triton.cdiv(outputs, block_n)
    split = 1 if rows > block_m else max(1, min(_PROGRAMS // programs, triton.cdiv(inputs, TILE) // 4, 16))
    return Cut(block_n, block_m, split, stages)


class Int4Launcher:
    """What the launches on one device have in common. `interpreted`: for Triton's interpreter, on any device."""

    def __init__(self, capability: tuple[int, int], *, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self._hopper = capability >= (9, 0)
        self.pdl = capability >= (9, 0) and hasattr(tl.extra.cuda, "gdc_wait") and not interpreted
        self._options: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}

    def multiply(self, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor) -> None:
        """x [T, I] -> x W^T + bias into out [T, O], a row of which is contiguous. float16 or bfloat16, sums in float32.
        Rows are independent of each other; another number of rows may be summed in another order."""
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if x.shape[0] >= DENSE_ROWS:
            out.copy_(linear(x, self.dequantise(weight, x.dtype), bias))
        elif x.shape[0]:
            self.multiply_as(x, weight, bias, out, cut_of(x.shape[0], *weight.shape, weight.group, hopper=self._hopper))

    def multiply_as(self, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor, cut: Cut) -> None:
        """The same with this cut, of columns in the order of the codes."""
        x = x.contiguous()
        rows, (outputs, inputs) = x.shape[0], weight.shape
        tiles, padded = weight.words.shape[1], weight.steps.shape[1]
        blocks = triton.cdiv(outputs, cut.block_n)
        each = triton.cdiv(tiles, cut.split)
        split = triton.cdiv(tiles, each)
        partial = out
        if split > 1:
            partial = torch.empty(split * blocks * cut.block_n * cut.block_m, dtype=torch.float32, device=x.device)
        multiply_rows[(blocks, split, triton.cdiv(rows, cut.block_m))](
            weight.words, weight.steps, x, bias, out, partial, weight.counters,
            rows, outputs, inputs, padded, out.stride(0), tiles, each, max(1, weight.group // TILE),
            BN=cut.block_n, BM=cut.block_m, PARTS=max(1, TILE // weight.group), SPLIT=split,
            SCALE=_SCALES[weight.scale_dtype], EVEN=inputs % TILE == 0, BIAS=bias is not None,
            ASM=not self.interpreted, PDL=self.pdl, STAGES=cut.stages, num_warps=4, **self._options,
        )  # fmt: skip

    def dequantise(self, weight: TiledWeight, dtype: torch.dtype) -> Tensor:
        """W [O, I] in `dtype`, columns in the order of the codes."""
        rows, columns = weight.shape
        dense = torch.empty(rows, columns, dtype=dtype, device=weight.words.device)
        tiles, padded = weight.words.shape[1], weight.steps.shape[1]
        dequantise_tiles[(triton.cdiv(rows, 64), tiles)](
            weight.words, weight.steps, dense, rows, columns, padded, tiles, max(1, weight.group // TILE),
            BN=64, PARTS=max(1, TILE // weight.group), SCALE=_SCALES[weight.scale_dtype],
            ASM=not self.interpreted, PDL=self.pdl, num_warps=4, **self._options,
        )  # fmt: skip
        return dense
