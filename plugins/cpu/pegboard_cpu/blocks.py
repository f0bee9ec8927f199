"""Linears over GGUF blocks that stay as they were stored, 4.5 to 8.5 bits a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pegboard.contracts.ops import Activation, Norm
from pegboard.errors import PegboardError

if TYPE_CHECKING:
    from .block_product import BlocksProduct


class BlocksLinear:
    """y = x W^T + b of this rank's part. x is rounded to 127 steps of the largest of each 32 numbers; what follows is
    exact but for float32 sums over the blocks. A row's result does not depend on its neighbours."""

    weight: Tensor | None = None

    def __init__(
        self,
        product: BlocksProduct,
        shape: tuple[int, int],
        bias: Tensor | None,
        partition: Literal["output", "input"] | None,
        all_reduce: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.bias = bias
        self.out_features, self.in_features = shape
        self.partition = partition
        self._product = product
        self._all_reduce = all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != self.in_features:
            raise PegboardError(f"x is {tuple(x.shape)} {x.dtype}, must be [T, {self.in_features}] float32")
        x = x if x.stride(1) == 1 else x.contiguous()
        if self._all_reduce is None:
            return self._product(x, biased=True)
        out = self._all_reduce(self._product(x, biased=False))
        return out if self.bias is None else out + self.bias  # the bias once, not on every rank

    def fuses(self, activation: Activation | None) -> bool:
        """Whether `project` serves: nothing is to be reduced, and both halves of a gated weight are whole tiles."""
        return self._all_reduce is None and (activation is None or self.out_features % (2 * self._product.lanes) == 0)

    def project(self, x: Tensor, norm: Norm | None, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """residual + act(norm(x) W^T + b), as `Ops.project`; x and residual float32 with rows side by side."""
        return self._product(x, biased=True, norm=norm, activation=activation, residual=residual)

    @property
    def weight_bytes(self) -> int:
        return self._product.nbytes + (0 if self.bias is None else self.bias.nbytes)
