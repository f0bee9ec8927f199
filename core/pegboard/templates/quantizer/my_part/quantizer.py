"""INT4 weights, rounded to nearest when they are loaded, with a scale for each group of input features.

They are unpacked whenever they are used: this saves memory, not time.

Letters: T tokens, I input features, O output features, B groups of a row, g features of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.dtypes import FLOAT_DTYPES, element_bytes
from pegboard.errors import ConfigError
from pegboard.linears import DenseParts, read_dense, scheme_refusals, shape_of, stored_names
from torch import Tensor
from torch.nn.functional import linear

from .options import Options

#: Steps on each side of zero, of four bits.
LEVELS = 7


class Int4Linear:
    """y = x W^T + b. Two weights a byte: the even feature in the lower half, LEVELS + 1 stands for zero."""

    #: No dense weight for ops to fuse around.
    weight: Tensor | None = None

    def __init__(self, parts: DenseParts, group: int) -> None:
        self.out_features, self.in_features = parts.weight.shape
        self.bias = parts.bias
        self.partition = parts.partition
        self._all_reduce = parts.all_reduce
        groups = parts.weight.view(self.out_features, -1, group).float()
        largest = groups.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest / LEVELS, 1.0)  # any scale serves a group of zeros
        codes = ((groups / scale).round().to(torch.int8) + LEVELS + 1).to(torch.uint8)  # [O, B, g]
        self._packed = codes[..., ::2] | codes[..., 1::2] << 4
        self._scale = scale.to(parts.weight.dtype)  # [O, B, 1]

    def __call__(self, x: Tensor) -> Tensor:
        codes = torch.stack((self._packed & 15, self._packed >> 4), dim=-1).flatten(-2)
        weight = ((codes.to(x.dtype) - (LEVELS + 1)) * self._scale).flatten(1)
        if self._all_reduce is None:
            return linear(x, weight, self.bias)
        out = self._all_reduce(linear(x, weight))  # the bias once, not on every rank
        return out if self.bias is None else out + self.bias

    @property
    def weight_bytes(self) -> int:
        return self._packed.nbytes + self._scale.nbytes + (0 if self.bias is None else self.bias.nbytes)


class MyPart(Quantizer):
    """Packs the linears of a dense checkpoint. Its descriptor has no `matches`: `auto` never rounds by itself."""

    def __init__(self, need: QuantizerNeed, options: Options) -> None:
        self._dtype = need.dtype
        self._device = f"{need.device.type}:{need.device.index}" if need.device.type == "cuda" else need.device.type
        self._group = options.group

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: Options) -> Sequence[str]:
        reasons = scheme_refusals(need)
        if need.dtype not in FLOAT_DTYPES:
            reasons.append(f"computes between activations of {', '.join(FLOAT_DTYPES)}, not of {need.dtype}")
        if need.batch_invariant:
            reasons.append("is not bit for bit independent of a row's neighbours: torch picks matmuls by shape")
        return reasons

    @classmethod
    def create(cls, need: QuantizerNeed, options: Options) -> Self:
        return cls(need, options)

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return stored_names(spec)

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        rows, columns = self._shape(spec, shard)
        number = element_bytes(self._dtype)
        packed = rows * (columns // 2 + columns // self._group * number)
        bias = rows * number if spec.bias else 0
        table = rows * columns * number if spec.tied else 0  # the embedding that the model keeps beside
        return packed + bias + table

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> Int4Linear:
        self._shape(spec, shard)
        return Int4Linear(read_dense(spec, checkpoint, shard, self._dtype, self._device), self._group)

    def _shape(self, spec: LinearSpec, shard: Shard) -> tuple[int, int]:
        rows, columns = shape_of(spec, shard)
        if columns % self._group:
            raise ConfigError(
                f"{spec.name}: {columns} input features are no multiple of group = {self._group}: choose another group"
            )
        return rows, columns
