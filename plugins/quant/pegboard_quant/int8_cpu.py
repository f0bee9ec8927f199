"""INT8 linears for CPUs: weights of a signed byte with a scale an output channel, activations of one or two bytes with
a scale a row. The sums are exact in int32, so a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.linears import DenseParts, read_dense, scheme_refusals, shape_of, stored_names

from .dense import cpu_float32_linear, cpu_float32_matrix_bytes
from .int8_products import WEIGHT_LEVELS, Product, best_product
from .linears import ShardLinear
from .options import Int8CpuOptions

#: With prefill = "float32", what has more rows than this is computed so.
FLOAT32_ROWS: Final = 32


class Int8Linear(ShardLinear):
    """`fine`: what the rounding of x left is a second byte, in a second row of the same product: the weights are read
    once for both. `wide` computes what has more than `FLOAT32_ROWS` rows; None: this does."""

    def __init__(
        self, parts: DenseParts, product: type[Product], levels: int, *, fine: bool, wide: ShardLinear | None
    ) -> None:
        super().__init__(parts)
        largest = torch.linalg.vector_norm(parts.weight, torch.inf, dim=1)
        # Any scale serves a channel of zeros
        scales = torch.where(largest > 0, largest / WEIGHT_LEVELS, 1.0)
        self._product = product((parts.weight / scales[:, None]).round_().to(torch.int8), scales)
        self._levels = levels
        self._fine = fine
        self._wide = wide

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._wide is not None and x.shape[0] > FLOAT32_ROWS:
            return self._wide.multiply(x, bias)
        scale = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).div_(self._levels)
        # A row of zeros divides by zero: whatever comes of it is multiplied by that zero
        steps = x / scale
        if self._fine:
            rounded = steps.round()
            rest = steps.sub_(rounded).mul_(2 * self._levels)
            coarse, rest = self._product(torch.cat((rounded, rest)), self._levels).chunk(2)
            sums = torch.add(coarse, rest, alpha=0.5 / self._levels).mul_(scale)
        else:
            sums = self._product(steps, self._levels).mul_(scale)
        return sums if bias is None else sums.add_(bias)

    @property
    def matrix_bytes(self) -> int:
        own = self.out_features * (self.in_features + _CHANNEL_BYTES)
        return own + (0 if self._wide is None else self._wide.matrix_bytes)


#: A channel's scale and zero point.
_CHANNEL_BYTES: Final = 8


class Int8CpuQuantizer(Quantizer):
    """Rounds the linears of a dense or GGUF checkpoint to INT8, once, at load."""

    def __init__(self, options: Int8CpuOptions) -> None:
        best = best_product()
        assert best is not None  # refused
        self._product, self._levels = best
        self._fine = options.activations == "int16"
        self._keeps_float32 = options.prefill == "float32"

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: Int8CpuOptions) -> Sequence[str]:
        reasons = []
        if need.device.type != "cpu":
            reasons.append(f"has kernels for CPUs only, not for {need.device.type}: use quantizer 'none' there")
        elif best_product() is None:
            reasons.append(f"torch {torch.__version__} has no exact INT8 product on this CPU: use quantizer 'none'")
        if need.dtype != "float32":
            reasons.append(f"computes between float32 activations only, not {need.dtype}: set dtype = 'float32'")
        if need.batch_invariant and options.prefill == "float32":
            reasons.append("is not bit for bit independent of a row's neighbours with prefill = 'float32'")
        return reasons + scheme_refusals(need)

    @classmethod
    def create(cls, need: QuantizerNeed, options: Int8CpuOptions) -> Self:
        return cls(options)

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return stored_names(spec)

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        rows, columns = shape_of(spec, shard)
        table = rows * columns * torch.float32.itemsize if spec.tied else 0
        wide = cpu_float32_matrix_bytes(spec, stored, shard, packs=True) if self._keeps_float32 else 0
        bias = rows * torch.float32.itemsize if spec.bias else 0
        return rows * (columns + _CHANNEL_BYTES) + wide + table + bias

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> Int8Linear:
        parts = read_dense(spec, checkpoint, shard, "float32", "cpu")
        wide: ShardLinear | None = None
        if self._keeps_float32:
            wide = cpu_float32_linear(spec, checkpoint.tensors(), parts, packs=True)
        return Int8Linear(parts, self._product, self._levels, fine=self._fine, wide=wide)
