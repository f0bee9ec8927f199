"""INT8 linears for CPUs: weights of a signed byte with a scale an output channel, activations of one or two bytes with
a scale a row. The sums are exact in int32, so a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Self

import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard

from .linears import DenseLinear, PackedLinear, ShardLinear, can_pack
from .options import Int8CpuOptions
from .reading import DenseParts, read_dense, scheme_refusals, shape_of, stored_names

logger = logging.getLogger("pegboard")

#: With prefill = "float32", what has more rows than this is computed so.
FLOAT32_ROWS: Final = 32
_WEIGHT_LEVELS: Final = 127


class Int8Linear(ShardLinear):
    """`fine`: what the rounding of x left is a second byte, in a second row of the same product: the weights are read
    once for both. `wide` computes what has more than `FLOAT32_ROWS` rows; None: this does."""

    def __init__(self, parts: DenseParts, levels: int, *, fine: bool, wide: ShardLinear | None) -> None:
        super().__init__(parts)
        largest = torch.linalg.vector_norm(parts.weight, torch.inf, dim=1)
        # Any scale serves a channel of zeros
        self._scales = torch.where(largest > 0, largest / _WEIGHT_LEVELS, 1.0)
        rounded = (parts.weight / self._scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zero_points = torch.zeros(self.out_features, dtype=torch.int32)
        self._levels = levels
        self._fine = fine
        self._wide = wide

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._wide is not None and x.shape[0] > FLOAT32_ROWS:
            return self._wide.multiply(x, bias)
        scale = x.abs().amax(dim=1, keepdim=True).div_(self._levels)
        # A row of zeros divides by zero: whatever bytes come of it are multiplied by that zero
        steps = x / scale
        rounded = steps.round()
        if self._fine:
            rest = steps.sub_(rounded).mul_(2 * self._levels).round_()
            rounded = torch.cat((rounded, rest))
        bytes_ = rounded.add_(_zero(self._levels)).to(torch.uint8)
        sums = _multiply(bytes_, self._packed, self._scales, self._zero_points, _zero(self._levels))
        if self._fine:
            coarse, rest = sums.chunk(2)
            sums = torch.add(coarse, rest, alpha=0.5 / self._levels)
        sums.mul_(scale)
        return sums if bias is None else sums.add_(bias)

    @property
    def matrix_bytes(self) -> int:
        own = self.out_features * (self.in_features + torch.float32.itemsize + torch.int32.itemsize)
        return own + (0 if self._wide is None else self._wide.matrix_bytes)


class Int8CpuQuantizer(Quantizer):
    """Rounds the linears of a dense or GGUF checkpoint to INT8, once, at load."""

    def __init__(self, options: Int8CpuOptions) -> None:
        levels = activation_levels()
        assert levels is not None  # refused
        self._levels = levels
        self._fine = options.activations == "int16"
        self._keeps_float32 = options.prefill == "float32"

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: Int8CpuOptions) -> Sequence[str]:
        reasons = []
        if need.device.type != "cpu":
            reasons.append(f"has kernels for CPUs only, not for {need.device.type}: use quantizer 'none' there")
        elif activation_levels() is None:
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

    def bytes_for(self, spec: LinearSpec, shard: Shard) -> int:
        rows, columns = shape_of(spec, shard)
        floats = int(spec.tied) + int(self._keeps_float32)  # the embedding's table; the one for many rows
        bias = 4 * rows if spec.bias else 0
        return rows * (columns + 8) + 4 * floats * rows * columns + bias

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> Int8Linear:
        parts = read_dense(spec, checkpoint, shard, "float32", "cpu")
        wide: ShardLinear | None = None
        if self._keeps_float32:
            wide = PackedLinear(parts) if can_pack() else DenseLinear(parts)
        return Int8Linear(parts, self._levels, fine=self._fine, wide=wide)


def _zero(levels: int) -> int:
    """The byte that stands for 0. oneDNN has fast kernels for unsigned activations only."""
    return levels + 1


def _multiply(rounded: Tensor, packed: Tensor, scales: Tensor, zero_points: Tensor, zero: int) -> Tensor:
    """(rounded [T, I] - zero) W^T * scales, float32 [T, O]"""
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        rounded, 1.0, zero, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


@cache
def activation_levels() -> int | None:
    """Steps between 0 and a row's largest value: 127, or 63 where a CPU without VNNI adds pairs of products in 16 bits.
    None: neither is exact, or this torch has other operators. Tried once, on the largest sums."""
    signs = torch.tensor([1, 1, -1, -1], dtype=torch.int8).repeat(32)
    weight = torch.stack((signs.abs(), -signs.abs(), signs, -signs)).repeat(16, 1) * _WEIGHT_LEVELS
    for levels in (127, 63):
        zero = _zero(levels)
        x = torch.stack((signs.abs(), -signs.abs(), signs)) * levels
        expected = (x.long() @ weight.long().T).float()
        try:
            packed = torch.ops.onednn.qlinear_prepack(weight, None)
            unit, zeros = torch.ones(weight.shape[0]), torch.zeros(weight.shape[0], dtype=torch.int32)
            rounded = (x.int() + zero).to(torch.uint8)
            parts = (rounded, rounded[:1], rounded[1:2], rounded[2:])  # together, and one row at a time
            found = [_multiply(part, packed, unit, zeros, zero) for part in parts]
        except (AttributeError, RuntimeError, TypeError) as error:
            logger.info("torch %s has no INT8 product for CPUs here: %s", torch.__version__, error)
            return None
        if torch.equal(found[0], expected) and torch.equal(torch.cat(found[1:]), expected):
            return levels
    return None
