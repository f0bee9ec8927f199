"""The linear that computes from packed weights: they stay packed, blocks of rows are dequantised one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import linear

from ..int4.layout import TiledWeight
from ..linears import ShardLinear
from .weight import PackedWeight, multiply

if TYPE_CHECKING:
    from ..int4.launching import Int4Launcher


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """A fused weight as runs of output features, in order; a dense one is of a source that the scheme skips."""

    pieces: tuple[PackedWeight | TiledWeight | Tensor, ...]

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
    """Tiled pieces are multiplied by kernels. For packed ones the workspace is `BLOCK` numbers of float32 and as many
    of the activations' dtype, and one uint8 copy."""

    def __init__(self, parts: PackedParts, launcher: Int4Launcher | None = None) -> None:
        super().__init__(parts)
        self.pieces = parts.weight.pieces
        self._launcher = launcher

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        launcher = self._launcher
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        start = 0
        for piece in self.pieces:
            part = out[:, start : start + piece.shape[0]]
            if isinstance(piece, TiledWeight) and launcher is not None:
                own = None if bias is None else bias[start : start + piece.shape[0]]
                launcher.multiply(x, piece, own, part)
            elif isinstance(piece, PackedWeight):
                multiply(x, piece, part)
                _add(part, bias, start)
            elif isinstance(piece, Tensor):
                part.copy_(linear(x, piece))
                _add(part, bias, start)
            start += piece.shape[0]
        return out

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `AddingLinear`."""
        launcher, tiled = self._launcher, [piece for piece in self.pieces if isinstance(piece, TiledWeight)]
        if launcher is None or self._all_reduce is not None or len(tiled) < len(self.pieces) or residual.stride(1) != 1:
            return residual.add_(self(x))
        start = 0
        for piece in tiled:
            end = start + piece.shape[0]
            bias = None if self.bias is None else self.bias[start:end]
            launcher.multiply(x, piece, bias, residual[:, start:end], adds=True)
            start = end
        return residual

    @property
    def matrix_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def _add(part: Tensor, bias: Tensor | None, start: int) -> None:
    if bias is not None:
        part.add_(bias[start : start + part.shape[1]])
