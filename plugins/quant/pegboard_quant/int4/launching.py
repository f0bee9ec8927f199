"""Launches the kernel that multiplies so many rows."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from .cuts import (
    FEW_ROWS,
    HELD_ROWS,
    STREAMED_ROWS,
    AnyCut,
    HeldCut,
    StreamedCut,
    held_cut,
    many_cut,
    rows_cut,
    streamed_columns,
    streamed_cut,
    streams,
)
from .digits import split_digits
from .held import multiply_held
from .kernels import dequantise_tiles, multiply_rows
from .layout import TILE, TiledWeight
from .many import multiply_many
from .streamed import multiply_streamed
from .tables import Cuts

#: Rows from which the weight is dequantised once and cuBLAS multiplies: with `multiply_many`, and without it.
DENSE_ROWS: Final = 1024
_DENSE_ROWS_ELSE: Final = 257
_TYPES: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
#: Of x in shared memory.
_LAYOUT: Final = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_LAYOUT_OF_BYTES: Final = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
#: Programs that split x into digits: about so many finish first.
_DIGITS_PROGRAMS: Final = 448


class Int4Launcher:
    """What the launches on one device have in common. `cuts` were measured there, rules stand for those that were not;
    `interpreted`: for Triton's interpreter, on any device."""

    def __init__(self, capability: tuple[int, int], cuts: Cuts | None = None, *, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self._cuts = cuts or Cuts(())
        self._hopper = capability[0] == 9 and not interpreted
        self._wide = capability >= (9, 0)
        self.pdl = capability >= (9, 0) and hasattr(tl.extra.cuda, "gdc_wait") and not interpreted
        self._options: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}

    def multiply(self, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor, *, adds: bool = False) -> None:
        """x [T, I] -> x W^T + bias into out [T, O], a row of which is contiguous; `adds`: to what it holds, whose
        memory x does not share. float16 or bfloat16, sums in float32. Rows are independent of each other; another
        number of rows may be summed in another order."""
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        rows, (outputs, inputs) = x.shape[0], weight.shape
        cut = self.cut_of(rows, outputs, inputs, weight.group)
        if cut is None:
            dense = self.dequantise(weight, x.dtype).T
            if adds:
                out.addmm_(x, dense)
                if bias is not None:
                    out.add_(bias)
            elif bias is None:
                torch.mm(x, dense, out=out)
            else:
                torch.addmm(bias, x, dense, out=out)
        elif rows:
            self.multiply_as(x, weight, bias, out, cut, adds=adds)

    def cut_of(self, rows: int, outputs: int, inputs: int, group: int) -> AnyCut | None:
        """How a product of so many rows is cut; None: the weight is dequantised once."""
        # Bulk copies want rows of a multiple of 16 bytes
        many = self._hopper and group >= TILE and inputs % 8 == 0
        if rows >= (DENSE_ROWS if many else _DENSE_ROWS_ELSE):
            return None
        measured = self._cuts.cut(max(1, rows), outputs, inputs, group)
        if measured is not None:
            return measured
        if many and rows <= STREAMED_ROWS and streams(rows, outputs, inputs):
            return streamed_cut(outputs, inputs)
        if self._hopper and group >= TILE and rows <= HELD_ROWS:
            held = held_cut(max(1, rows), outputs, inputs)
            if held is not None:
                return held
        if many and rows > FEW_ROWS:
            return many_cut(rows, outputs, inputs)
        return rows_cut(max(1, rows), outputs, inputs, group, wide=self._wide)

    def multiply_as(
        self,
        x: Tensor,
        weight: TiledWeight,
        bias: Tensor | None,
        out: Tensor,
        cut: AnyCut,
        *,
        adds: bool = False,
    ) -> None:
        """The same with this cut, of columns in the order of the codes."""
        x = x.contiguous()
        rows, (outputs, inputs) = x.shape[0], weight.shape
        tiles, padded = weight.words.shape[1], weight.steps.shape[1]
        common: dict[str, Any] = {"SCALE": _TYPES[weight.scale_dtype], "BIAS": bias is not None, "ADDS": adds}
        common |= {"PDL": self.pdl, **self._options}
        group_tiles = max(1, weight.group // TILE)
        if isinstance(cut, StreamedCut):
            self._multiply_streamed(x, weight, bias, out, cut, group_tiles, common)
            return
        blocks = triton.cdiv(outputs, cut.block_n)
        if isinstance(cut, HeldCut):
            multiply_held[(blocks,)](
                weight.words, weight.steps, x, bias, out, rows, outputs, inputs, padded, out.stride(0), group_tiles,
                TILES=tiles, BLOCK_N=cut.block_n, ROWS=triton.next_power_of_2(rows), AHEAD=cut.ahead,
                num_warps=cut.warps, **common,
            )  # fmt: skip
            return
        row_blocks, each = triton.cdiv(rows, cut.block_m), triton.cdiv(tiles, cut.split)
        split = 2 if cut.head else triton.cdiv(tiles, each)
        partial = out
        if split > 1:
            size = split * blocks * row_blocks * cut.block_n * cut.block_m
            partial = torch.empty(size, dtype=torch.float32, device=x.device)
        copied = self._hopper and inputs % 8 == 0 and x.data_ptr() % 16 == 0
        shape, strides, box = [rows, inputs], [inputs, 1], [cut.block_m, TILE]
        if cut.overlapped or cut.block_m > FEW_ROWS:
            multiply_many[(row_blocks, blocks, split)](
                weight.words, weight.steps, SharedDescriptor(x if copied else x.clone(), shape, strides, box, _LAYOUT),
                bias, out, partial, weight.counters, rows, outputs, padded, out.stride(0), tiles, each, group_tiles,
                BN=cut.block_n, BM=cut.block_m, SPLIT=split, STAGES=cut.stages, num_warps=cut.block_n // 16, **common,
            )  # fmt: skip
            return
        copied &= cut.block_m == FEW_ROWS
        programs = 2 * blocks - cut.whole if cut.head else blocks
        multiply_rows[(programs, 1 if cut.head else split, row_blocks)](
            weight.words, weight.steps, TensorDescriptor(x, shape, strides, box) if copied else x, bias, out, partial,
            weight.counters, rows, outputs, inputs, padded, out.stride(0), tiles, each, group_tiles,
            BN=cut.block_n, BM=cut.block_m, PARTS=max(1, TILE // weight.group), SPLIT=split, SHIFTED=weight.shifted,
            DTYPE=_TYPES[x.dtype], EVEN=inputs % TILE == 0, ASM=not self.interpreted, COPIED=copied,
            STAGES=cut.stages, FETCHED=cut.fetched, EARLY=cut.early and self.pdl,
            BLOCKS=blocks if split > 1 else 0, WHOLE=cut.whole, HEAD=cut.head, SPREAD=cut.spread and split > 1,
            num_warps=4, **common,
        )  # fmt: skip

    def _multiply_streamed(
        self, x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor, cut: StreamedCut, group_tiles: int,
        common: dict[str, Any],
    ) -> None:  # fmt: skip
        rows, (outputs, inputs) = x.shape[0], weight.shape
        tiles, columns, blocks = weight.words.shape[1], streamed_columns(rows), triton.cdiv(outputs, cut.block_n)
        each = triton.cdiv(tiles, cut.split)
        split = triton.cdiv(tiles, each)
        partial, factors = out, None
        if split > 1:
            size = split * blocks * cut.block_n * columns
            partial = torch.empty(size, dtype=torch.float32, device=x.device)
        if cut.digits:
            digits, factors = self._digits(x, tiles, columns)
            box = [cut.copied * 2 * columns, TILE]
            source = SharedDescriptor(digits, list(digits.shape), [TILE, 1], box, _LAYOUT_OF_BYTES)
        else:
            x = x if x.data_ptr() % 16 == 0 else x.clone()
            source = SharedDescriptor(x, [rows, inputs], [inputs, 1], [columns, TILE], _LAYOUT)
        multiply_streamed[(blocks, split)](
            weight.words, weight.steps, source, factors, bias, out, partial, weight.counters, rows, outputs,
            weight.steps.shape[1], out.stride(0), tiles, each, group_tiles,
            BN=cut.block_n, BM=columns, SPLIT=split, DEPTH=cut.depth, COPIED=cut.copied, STAGES=cut.stages,
            DIGITS=cut.digits, PART=triton.next_power_of_2(triton.cdiv(each, cut.depth) * cut.depth),
            WHOLE=tiles % split == 0 and each % cut.depth == 0,
            num_warps=cut.block_n // 16, maxnreg=128 if cut.digits else None, **common,
        )  # fmt: skip

    def _digits(self, x: Tensor, tiles: int, columns: int) -> tuple[Tensor, Tensor]:
        """x [T, I] -> digits and factors of `split_digits`, for so many rows; those that x lacks are left undefined."""
        rows, inputs = x.shape
        digits = torch.empty(tiles * 2 * columns, TILE, dtype=torch.int8, device=x.device)
        factors = torch.empty(tiles, 2, columns, dtype=torch.float32, device=x.device)
        warps = min(8, triton.next_power_of_2(triton.cdiv(rows * tiles, _DIGITS_PROGRAMS)))
        split_digits[(rows, triton.cdiv(tiles, warps))](
            x, digits, factors, inputs, BM=columns, PDL=self.pdl, num_warps=warps, **self._options
        )
        return digits, factors

    def dequantise(self, weight: TiledWeight, dtype: torch.dtype) -> Tensor:
        """W [O, I] in `dtype`, columns in the order of the codes."""
        rows, columns = weight.shape
        dense = torch.empty(rows, columns, dtype=dtype, device=weight.words.device)
        tiles, padded = weight.words.shape[1], weight.steps.shape[1]
        dequantise_tiles[(triton.cdiv(rows, 64), tiles)](
            weight.words, weight.steps, dense, rows, columns, padded, tiles, max(1, weight.group // TILE),
            BN=64, PARTS=max(1, TILE // weight.group), SCALE=_TYPES[weight.scale_dtype], SHIFTED=weight.shifted,
            ASM=not self.interpreted, PDL=self.pdl, num_warps=4, **self._options,
        )  # fmt: skip
        return dense
