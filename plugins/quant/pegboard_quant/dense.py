"""Dense linears: weights in the activations' dtype, whatever the checkpoint stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pegboard.contracts.checkpoint import Checkpoint
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.dtypes import FLOAT_DTYPES, element_bytes

from .linears import DenseLinear, PackedLinear, ShardLinear, can_pack
from .options import DenseOptions
from .reading import read_dense, scheme_refusals, shape_of, stored_names


class DenseQuantizer(Quantizer):
    """Scheme "none". Blocks (GGUF) are dequantised once, at load; float32 on the CPU is packed for oneDNN."""

    def __init__(self, need: QuantizerNeed, options: DenseOptions) -> None:
        self._dtype = need.dtype
        self._device = f"{need.device.type}:{need.device.index}" if need.device.type == "cuda" else need.device.type
        self._packs = options.pack and need.device.type == "cpu" and need.dtype == "float32" and can_pack()

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: DenseOptions) -> Sequence[str]:
        reasons = []
        if need.dtype not in FLOAT_DTYPES:
            reasons.append(f"makes weights of {', '.join(FLOAT_DTYPES)}, not of {need.dtype}")
        if need.batch_invariant:
            reasons.append("is not bit for bit independent of a row's neighbours: torch picks matmuls by shape")
        return reasons + scheme_refusals(need)

    @classmethod
    def create(cls, need: QuantizerNeed, options: DenseOptions) -> Self:
        return cls(need, options)

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return stored_names(spec)

    def bytes_for(self, spec: LinearSpec, shard: Shard) -> int:
        rows, columns = shape_of(spec, shard)
        matrices = 2 if spec.tied and self._packs else 1  # the packed one, and the embedding's plain one
        return (matrices * rows * columns + (rows if spec.bias else 0)) * element_bytes(self._dtype)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> ShardLinear:
        parts = read_dense(spec, checkpoint, shard, self._dtype, self._device)
        return PackedLinear(parts) if self._packs else DenseLinear(parts)
