"""The record of a group-quantized weight, which every format is read into and every kernel takes."""

from __future__ import annotations

from typing import Final

import msgspec
import torch
from torch import Tensor

from .codes import unpack

#: Codes that one block of rows is dequantised from at a time: what bounds the workspace.
BLOCK: Final = 1 << 20


class PackedWeight(msgspec.Struct, frozen=True, kw_only=True):
    """W [O, I] = scale * (code - zero point), or scale * code + offset, with one of each for a row and group of
    columns.

    Column j of the codes multiplies input feature `order[j]` (None: j), and belongs to group `groups[j]` (None:
    j // group, the last group may be shorter). Never both: where a rank's columns cut groups in two or are no runs of
    whole groups, they stay in their order and `groups` names the group of each."""

    bits: int
    in_features: int
    #: Columns a group.
    group: int
    #: uint8 [O, `codes.row_bytes`].
    codes: Tensor
    #: [O, G], in the float dtype of the file.
    scales: Tensor
    #: uint8 [O, G]; None: all are 2^(bits - 1).
    zeros: Tensor | None = None
    #: [O, G], in the dtype of the scales; then there are no zero points.
    offsets: Tensor | None = None
    #: int32 [I].
    order: Tensor | None = None
    #: int32 [I].
    groups: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.in_features

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.scales, self.zeros, self.offsets, self.order, self.groups)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def dequantise(weight: PackedWeight, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows [start, stop) as `dtype` [rows, I], columns in the order of the codes.

    float32 and wider are the exact products of formats whose scales have 16 bits: a difference of codes has 9."""
    codes = unpack(weight.codes[start:stop], weight.bits, weight.in_features)
    if weight.offsets is not None:
        scales, offsets = (_spread(part[start:stop].to(dtype), weight) for part in (weight.scales, weight.offsets))
        return codes.to(dtype).mul_(scales).add_(offsets)
    scales = weight.scales[start:stop].to(dtype)
    zeros = None if weight.zeros is None else weight.zeros[start:stop].to(dtype)
    middle = float(1 << (weight.bits - 1))
    if weight.groups is not None:
        steps = codes.to(dtype) - (middle if zeros is None else zeros.index_select(1, weight.groups))
        return steps.mul_(scales.index_select(1, weight.groups))
    if weight.in_features % weight.group == 0:
        steps = codes.to(dtype).view(stop - start, -1, weight.group)
        steps = steps.sub_(middle if zeros is None else zeros[:, :, None])
        return steps.mul_(scales[:, :, None]).view(stop - start, weight.in_features)
    steps = codes.to(dtype).sub_(middle if zeros is None else _spread(zeros, weight))
    return steps.mul_(_spread(scales, weight))


def dense(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """All of it, [O, I] in the order of the input features."""
    rows = dequantise(weight, 0, weight.shape[0], dtype)
    if weight.order is None:
        return rows
    return torch.empty_like(rows).index_copy_(1, weight.order.long(), rows)


def multiply(x: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """x [T, I] -> x W^T into out [T, O], a block of rows of W at a time."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    # Codes times scales need more digits than 16-bit dtypes have
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows, columns = weight.shape
    step = max(1, BLOCK // max(columns, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        out[:, start:stop] = x @ dequantise(weight, start, stop, wide).to(x.dtype).T


def _spread(values: Tensor, weight: PackedWeight) -> Tensor:
    """[O, G] -> [O, I]"""
    if weight.groups is not None:
        return values.index_select(1, weight.groups)
    return values.repeat_interleave(weight.group, dim=1)[:, : weight.in_features]
