"""The quantizers of checkpoints that are stored packed: awq, gptq, compressed-tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.devices import torch_device
from pegboard.dtypes import FLOAT_DTYPES, element_bytes
from pegboard.errors import ConfigError
from pegboard.linears import shape_of

from ..dense import DenseQuantizer
from ..int4.choice import kernel_refusal, new_launcher, new_tuner, table_refusals
from ..linears import ShardLinear
from ..options import DenseOptions, PackedOptions
from .awq import awq_scheme
from .compressed_tensors import compressed_tensors_scheme
from .gptq import gptq_scheme
from .layout import Layout
from .linear import GroupLinear
from .reading import expected, kernel_shapes, packed_bytes, read_packed
from .scheme import Scheme

if TYPE_CHECKING:
    from ..int4.tuning import Int4Tuner


def path_refusals(need: QuantizerNeed) -> list[str]:
    """What packed linears can't do, whatever the format."""
    reasons = []
    if need.dtype not in FLOAT_DTYPES:
        reasons.append(f"multiplies activations of {', '.join(FLOAT_DTYPES)}, not of {need.dtype}")
    if need.batch_invariant:
        reasons.append("is not bit for bit independent of a row's neighbours: torch picks matmuls by shape")
    return reasons


def path_notes(need: QuantizerNeed) -> list[str]:
    """The hardware check's result, for the report."""
    refusal = kernel_refusal(need)
    if refusal is None:
        return [
            "weights of 4 bits in groups of 32, 64, a multiple of 128 or all columns stay packed and are multiplied by "
            "Triton kernels: this gains memory and speed; torch dequantises others block by block in every step"
        ]
    on_cpu = need.device.type == "cpu"
    where = "a CPU" if on_cpu else "CUDA"
    reason = "; quantizer 'int8-cpu' is faster there, on a dense or GGUF checkpoint" if on_cpu else f" ({refusal})"
    return [
        f"weights stay packed in memory; on {where} torch dequantises them block by block in every step: this gains "
        f"memory, no speed{reason}"
    ]


class PackedQuantizer(Quantizer):
    """What is stored packed stays packed; modules that the scheme skips, and those that are stored dense, are dense."""

    def __init__(self, need: QuantizerNeed, scheme: Scheme, options: PackedOptions) -> None:
        self._scheme = scheme
        self._need = need
        self._dtype = need.dtype
        self._launcher = new_launcher(need, options.table)
        self._device = torch_device(need.device)
        self._dense = DenseQuantizer.create(need, DenseOptions())

    @classmethod
    @abstractmethod
    def scheme(cls, config: Mapping[str, Any]) -> Scheme:
        """ConfigError: what can't be read, and what would be right."""

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: PackedOptions | None) -> Sequence[str]:
        reasons = path_refusals(need) + table_refusals(need, None if options is None else options.table)
        try:
            cls.scheme(need.scheme)
        except ConfigError as error:
            reasons += error.reasons or [str(error)]
        return reasons

    @classmethod
    def create(cls, need: QuantizerNeed, options: PackedOptions | None) -> Self:
        return cls(need, cls.scheme(need.scheme), options or PackedOptions())

    @classmethod
    def tuner(cls, need: QuantizerNeed, options: PackedOptions) -> Int4Tuner:
        """For `pegboard tune`. ConfigError: the kernels don't run here."""
        return new_tuner(need, options.table, cls.create(need, options).kernel_shapes)

    def notes(self) -> Sequence[str]:
        return path_notes(self._need)

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        layouts = self._layouts(spec, names)
        if not any(layouts):
            return self._dense.tensor_names(spec, names)
        return tuple(expected(spec, layouts, names))

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        layouts = self._layouts(spec, stored)
        if not any(layouts):
            return self._dense.bytes_for(spec, stored, shard)
        rows, columns = shape_of(spec, shard)
        bias = rows * element_bytes(self._dtype) if spec.bias else 0
        table = rows * columns * element_bytes(self._dtype) if spec.tied else 0
        return packed_bytes(spec, layouts, stored, shard, self._dtype, tiled=self._tiled) + bias + table

    def kernel_shapes(
        self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard
    ) -> list[tuple[int, int, int]]:
        """(outputs, inputs, columns a group) of what the kernels multiply."""
        return kernel_shapes(spec, self._layouts(spec, stored), stored, shard)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> ShardLinear:
        layouts = self._layouts(spec, checkpoint.tensors())
        if not any(layouts):
            return self._dense.linear(spec, checkpoint, shard)
        parts = read_packed(spec, layouts, checkpoint, shard, self._dtype, self._device, tiled=self._tiled)
        return GroupLinear(parts, self._launcher)

    @property
    def _tiled(self) -> bool:
        return self._launcher is not None

    def _layouts(self, spec: LinearSpec, names: Mapping[str, Any]) -> list[Layout | None]:
        return [
            self._layout(source, rows, spec.in_features, names)
            for source, rows in zip(spec.sources, spec.out_features, strict=True)
        ]

    def _layout(self, source: str, rows: int, columns: int, names: Mapping[str, Any]) -> Layout | None:
        """Schemes seldom name all that they skip (heads, embeddings that are heads, too): what has a dense weight and
        nothing else is dense."""
        layout = self._scheme.layout(source)
        if layout is None or f"{source}.weight" not in names:
            return layout
        packed = layout.expected(source, rows, columns, names)
        return layout if any(name in names for name in packed) else None


class AwqQuantizer(PackedQuantizer):
    @classmethod
    def scheme(cls, config: Mapping[str, Any]) -> Scheme:
        return awq_scheme(config)


class GptqQuantizer(PackedQuantizer):
    @classmethod
    def scheme(cls, config: Mapping[str, Any]) -> Scheme:
        return gptq_scheme(config)


class CompressedTensorsQuantizer(PackedQuantizer):
    @classmethod
    def scheme(cls, config: Mapping[str, Any]) -> Scheme:
        return compressed_tensors_scheme(config)
