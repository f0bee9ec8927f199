"""Dense linears: weights in the activations' dtype, whatever the checkpoint stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from pegboard.contracts.checkpoint import Checkpoint
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.dtypes import FLOAT_DTYPES, element_bytes
from pegboard.errors import CheckpointError, ConfigError


class DenseLinear:
    """y = x W^T + b with weight [O, I]. The weight may be a view of a mapped file: never written."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
        partition: Literal["output", "input"] | None = None,
    ) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.partition = partition
        self._weight = weight
        self._all_reduce = all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        if self._all_reduce is None:
            return linear(x, self._weight, self.bias)
        out = self._all_reduce(linear(x, self._weight))
        return out if self.bias is None else out + self.bias

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._weight, self.bias) if tensor is not None)


class DenseQuantizer(Quantizer):
    """Scheme "none". Blocks (GGUF) are dequantised once, at load."""

    def __init__(self, need: QuantizerNeed) -> None:
        self._dtype = need.dtype
        self._device = f"{need.device.type}:{need.device.index}" if need.device.type == "cuda" else need.device.type

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: Any) -> Sequence[str]:
        reasons = []
        if need.dtype not in FLOAT_DTYPES:
            reasons.append(f"makes weights of {', '.join(FLOAT_DTYPES)}, not of {need.dtype}")
        if need.batch_invariant:
            reasons.append("is not bit for bit independent of a row's neighbours: torch picks matmuls by shape")
        method = need.scheme.get("quant_method")
        if method not in (None, "none"):
            reasons.append(f"reads dense weights only; the checkpoint is quantized with {method!r}")
        return reasons

    @classmethod
    def create(cls, need: QuantizerNeed, options: Any) -> Self:
        return cls(need)

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return _names(spec, "weight") + (_names(spec, "bias") if spec.bias else ())

    def bytes_for(self, spec: LinearSpec, shard: Shard) -> int:
        rows = sum(length for _, length in _output_parts(spec, shard))
        columns = _input_part(spec, shard)[1]
        return (rows * columns + (rows if spec.bias else 0)) * element_bytes(self._dtype)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> DenseLinear:
        self._check(spec, checkpoint)
        split = shard.size > 1 and spec.partition is not None
        if split and spec.partition == "input" and shard.all_reduce is None:
            raise ConfigError(
                f"{spec.name} is split along its input over {shard.size} ranks: the shard needs all_reduce"
            )
        parts, (column, columns) = _output_parts(spec, shard), _input_part(spec, shard)
        by_input = split and spec.partition == "input"

        def read(name: str, start: int, length: int) -> Tensor:
            if by_input and name.endswith(".weight"):
                return checkpoint.read(
                    name, dtype=self._dtype, device=self._device, dim=1, start=column, length=columns
                )
            return checkpoint.read(name, dtype=self._dtype, device=self._device, dim=0, start=start, length=length)

        def fused(suffix: str) -> Tensor:
            read_parts = [
                read(name, start, length) for name, (start, length) in zip(_names(spec, suffix), parts, strict=True)
            ]
            # A single source stays a view of the file where the checkpoint gives one
            return read_parts[0] if len(read_parts) == 1 else torch.cat(read_parts)

        return DenseLinear(
            fused("weight"),
            fused("bias") if spec.bias else None,
            shard.all_reduce if by_input else None,
            spec.partition if split else None,
        )

    def _check(self, spec: LinearSpec, checkpoint: Checkpoint) -> None:
        """Every missing and wrong-shaped tensor at once."""
        stored, problems = checkpoint.tensors(), []
        for source, rows in zip(spec.sources, spec.out_features, strict=True):
            expected: dict[str, tuple[int, ...]] = {f"{source}.weight": (rows, spec.in_features)}
            if spec.bias:
                expected[f"{source}.bias"] = (rows,)
            for name, shape in expected.items():
                if name not in stored:
                    problems.append(f"{name} {shape} is missing")
                elif tuple(stored[name].shape) != shape:
                    problems.append(f"{name} has shape {tuple(stored[name].shape)}, expected {shape}")
        if problems:
            raise CheckpointError(f"{spec.name}: {'; '.join(problems)}")


def _names(spec: LinearSpec, suffix: str) -> tuple[str, ...]:
    return tuple(f"{source}.{suffix}" for source in spec.sources)


def _share(name: str, size: int, unit: int, shard: Shard) -> tuple[int, int]:
    """(start, length) of this rank's part of `size` features, in whole units. ConfigError: it does not divide."""
    if size % (unit * shard.size):
        raise ConfigError(f"{name}: {size} features in units of {unit} can't be split over {shard.size} ranks")
    length = size // shard.size
    return shard.rank * length, length


def _output_parts(spec: LinearSpec, shard: Shard) -> list[tuple[int, int]]:
    """(start, length) of this rank's rows of each source."""
    if spec.partition != "output":
        return [(0, rows) for rows in spec.out_features]
    return [
        _share(source, rows, spec.unit, shard) for source, rows in zip(spec.sources, spec.out_features, strict=True)
    ]


def _input_part(spec: LinearSpec, shard: Shard) -> tuple[int, int]:
    if spec.partition != "input":
        return 0, spec.in_features
    return _share(spec.name, spec.in_features, 1, shard)
