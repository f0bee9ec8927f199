"""Linears over GGUF blocks that stay packed, 4.5 to 8.5 bits a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pegboard.contracts.ops import Activation, Norm
from pegboard.errors import PegboardError

if TYPE_CHECKING:
    from .block_product import BlocksProduct


class BlocksLinear:
    """y = x W^T + b of this rank's part. x is rounded to 127 steps of the largest of each 32 numbers; what follows is
    exact but for float32 sums over the blocks. A row's result does not depend on its neighbours.

    Sources whose blocks are of different types have products of their own, side by side."""

    weight: Tensor | None = None

    def __init__(
        self,
        products: Sequence[BlocksProduct],
        shape: tuple[int, int],
        bias: Tensor | None,
        partition: Literal["output", "input"] | None,
        all_reduce: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.bias = bias
        self.out_features, self.in_features = shape
        self.partition = partition
        self._products = tuple(products)
        self._all_reduce = all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != self.in_features:
            raise PegboardError(f"x is {tuple(x.shape)} {x.dtype}, must be [T, {self.in_features}] float32")
        x = x if x.stride(1) == 1 else x.contiguous()
        if self._all_reduce is None:
            return self.project(x, None, None, None)
        out = self._all_reduce(self._multiply(x, biased=False))
        return out if self.bias is None else out + self.bias  # the bias once, not on every rank

    def fuses(self, activation: Activation | None) -> bool:
        """Whether `project` serves: nothing is to be reduced, and both halves of a gated weight are whole tiles of one
        product."""
        if self._all_reduce is not None:
            return False
        return activation is None or (
            len(self._products) == 1 and self.out_features % (2 * self._products[0].lanes) == 0
        )

    def project(self, x: Tensor, norm: Norm | None, activation: Activation | None, residual: Tensor | None) -> Tensor:
        """residual + act(norm(x) W^T + b), as `Ops.project`; x and residual float32 with rows side by side."""
        return self._multiply(x, biased=True, norm=norm, activation=activation, residual=residual)

    def _multiply(
        self,
        x: Tensor,
        *,
        biased: bool,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        out = x.new_empty(x.shape[0], self.out_features if activation is None else self.out_features // 2)
        if not x.shape[0]:
            return out
        around: dict[str, Any] = {"biased": biased, "norm": norm, "activation": activation}
        if len(self._products) == 1:
            self._products[0](x, out, **around, residual=residual)
            return out
        start = 0
        for product in self._products:
            run = slice(start, start + product.features)
            product(x, out[:, run], **around, residual=None if residual is None else residual[:, run])
            start += product.features
        return out

    @property
    def weight_bytes(self) -> int:
        held = sum(product.nbytes for product in self._products)
        return held + (0 if self.bias is None else self.bias.nbytes)
