"""The linear that computes from packed weights: they stay packed, blocks of rows are dequantised one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import linear

from ..linears import ShardLinear
from .weight import PackedWeight, multiply


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """A fused weight as runs of output features, in order; a dense one is of a source that the scheme skips."""

    pieces: tuple[PackedWeight | Tensor, ...]

    @property
    def shape(self) -> Sequence[int]:
        return sum(piece.shape[0] for piece in self.pieces), self.pieces[0].shape[1]


class PackedParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a packed linear is made of, of this rank; see `DenseParts`."""

    weight: Pieces
    bias: Tensor | None
    all_reduce: Callable[[Tensor], Tensor] | None
    partition: Literal["output", "input"] | None


class GroupLinear(ShardLinear):
    """The workspace is `BLOCK` numbers of float32 and as many of the activations' dtype, and one uint8 copy."""

    def __init__(self, parts: PackedParts) -> None:
        super().__init__(parts)
        self.pieces = parts.weight.pieces

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        start = 0
        for piece in self.pieces:
            part = out[:, start : start + piece.shape[0]]
            if isinstance(piece, PackedWeight):
                multiply(x, piece, part)
            else:
                part.copy_(linear(x, piece))
            start += piece.shape[0]
        return out if bias is None else out.add_(bias)

    @property
    def matrix_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)
