"""Rounding to the nearest code, group by group."""

from __future__ import annotations

from typing import Final

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from .codes import pack
from .weight import PackedWeight

#: Numbers that are rounded at a time: bounds the workspace.
_BLOCK: Final = 1 << 22


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The codes' scale and zero point for each row and group; zeros None: 2^(bits - 1)."""

    bits: int
    #: Columns a group.
    group: int
    #: [O, G] in the dtype that they are stored in.
    scales: Tensor
    #: uint8 [O, G]
    zeros: Tensor | None

    def codes(self, weight: Tensor, first: int = 0) -> Tensor:
        """The nearest codes, uint8, of columns that begin with the group `first`."""
        groups = first + torch.arange(weight.shape[1], device=weight.device) // self.group
        steps = (weight / self.scales.float()[:, groups]).round_().add_(self._zeros(groups))
        return steps.clamp_(0, (1 << self.bits) - 1).to(torch.uint8)

    def values(self, codes: Tensor, first: int = 0) -> Tensor:
        """What codes of such columns mean, float32."""
        groups = first + torch.arange(codes.shape[1], device=codes.device) // self.group
        return codes.float().sub_(self._zeros(groups)).mul_(self.scales.float()[:, groups])

    def _zeros(self, groups: Tensor) -> Tensor | float:
        return float(1 << (self.bits - 1)) if self.zeros is None else self.zeros.float()[:, groups]


def grid_of(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> Grid:
    """The least grid that spans each group of a weight [O, I] float32; group -1: all columns."""
    size = weight.shape[1] if group == -1 else group
    groups = -(-weight.shape[1] // size)
    padded = pad(weight, (0, groups * size - weight.shape[1])).view(weight.shape[0], groups, size)
    largest = (1 << bits) - 1
    # Grids hold 0: what a zero is made of stays exactly that
    high, low = padded.amax(2).clamp_(min=0), padded.amin(2).clamp_(max=0)
    span = 2 * torch.maximum(high, -low) if symmetric else high - low
    # A scale of 0 divides, one beyond the dtype's range overflows
    dtype = scale_dtype(bits)
    limits = torch.finfo(dtype)
    scales = (span / largest).clamp_(limits.smallest_normal, limits.max).to(dtype)
    zeros = None if symmetric else (-low / scales.float()).round_().clamp_(0, largest).to(torch.uint8)
    return Grid(bits=bits, group=size, scales=scales, zeros=zeros)


def scale_dtype(bits: int) -> torch.dtype:
    """Of what is rounded here: 8 digits move the last of 15 steps by 0.03, that of 255 by half a step."""
    return torch.bfloat16 if bits == 4 else torch.float32


def round_to_nearest(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> PackedWeight:
    """A weight [O, I] of any float dtype, a block of rows at a time."""
    rows, columns = weight.shape
    step = max(1, _BLOCK // max(columns, 1))
    codes, scales, zeros = [], [], []
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        grid = grid_of(part, bits, group, symmetric=symmetric)
        codes.append(pack(grid.codes(part), bits))
        scales.append(grid.scales)
        zeros.append(grid.zeros)
    return PackedWeight(
        bits=bits,
        in_features=columns,
        group=columns if group == -1 else group,
        codes=torch.cat(codes),
        scales=torch.cat(scales),
        zeros=None if symmetric else torch.cat([part for part in zeros if part is not None]),
    )
