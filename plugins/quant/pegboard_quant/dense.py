"""Dense linears: weights in the activations' dtype, whatever the checkpoint stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.devices import torch_device
from pegboard.dtypes import FLOAT_DTYPES, element_bytes
from pegboard.linears import DenseParts, read_dense, scheme_refusals, shape_of, stored_names, weight_names

from .half import HalfLinear, can_halve
from .linears import DenseLinear, PackedLinear, ShardLinear, can_pack
from .options import DenseOptions

_HALVES: Final = frozenset({"float16", "bfloat16", "F16", "BF16"})


class DenseQuantizer(Quantizer):
    """Scheme "none". Blocks (GGUF) are dequantised once, at load. float32 on the CPU is packed for the libraries that
    are fastest there; weights of 16 bits stay in 16 bits."""

    def __init__(self, need: QuantizerNeed, options: DenseOptions) -> None:
        self._dtype = need.dtype
        self._device = torch_device(need.device)
        self._is_cpu_float32 = need.device.type == "cpu" and need.dtype == "float32"
        self._packs = options.pack

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

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        rows, columns = shape_of(spec, shard)
        matrix = rows * columns * element_bytes(self._dtype)
        bias = rows * element_bytes(self._dtype) if spec.bias else 0
        if not self._is_cpu_float32:
            return matrix + bias
        lends_no_table = self._packs and _is_halved(spec, stored)
        own = cpu_float32_matrix_bytes(spec, stored, shard, packs=self._packs)
        return own + bias + (matrix if spec.tied and lends_no_table else 0)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> ShardLinear:
        parts = read_dense(spec, checkpoint, shard, self._dtype, self._device)
        if self._is_cpu_float32:
            return cpu_float32_linear(spec, checkpoint.tensors(), parts, packs=self._packs)
        return DenseLinear(parts)


def cpu_float32_linear(
    spec: LinearSpec, stored: Mapping[str, TensorInfo], parts: DenseParts, *, packs: bool
) -> ShardLinear:
    """The fastest linear between float32 activations on this CPU; not `packs`: on the plain weight."""
    if packs and _is_halved(spec, stored):
        return HalfLinear(parts)
    return PackedLinear(parts) if packs and can_pack() else DenseLinear(parts)


def cpu_float32_matrix_bytes(spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard, *, packs: bool) -> int:
    """Bytes of the matrix, or of both, that `cpu_float32_linear` will hold."""
    rows, columns = shape_of(spec, shard)
    if packs and _is_halved(spec, stored):
        return rows * columns * element_bytes("float16")
    return rows * columns * element_bytes("float32") * (2 if packs and can_pack() else 1)


def _is_halved(spec: LinearSpec, stored: Mapping[str, TensorInfo]) -> bool:
    kinds = {stored[name].storage if name in stored else None for name in weight_names(spec)}
    return kinds <= _HALVES and can_halve()
