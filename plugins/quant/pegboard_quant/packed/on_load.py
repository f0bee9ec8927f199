"""int4 and int8: the linears of a dense or GGUF checkpoint, rounded to the nearest code once, at load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.devices import torch_device
from pegboard.dtypes import element_bytes
from pegboard.errors import CheckpointError
from pegboard.linears import input_part, output_parts, read_dense, scheme_refusals, shape_of, stored_names

from ..dense import DenseQuantizer
from ..int4.choice import new_launcher, new_tuner, serves, serves_weight, table_refusals
from ..int4.layout import TiledWeight, groups_of, tile, tiled_bytes
from ..linears import ShardLinear
from ..options import DenseOptions, Rounding4Options, RoundingOptions
from .codes import row_bytes
from .linear import GroupLinear, PackedParts, Pieces
from .quantizers import path_notes, path_refusals
from .rounding import round_to_nearest, scale_dtype
from .scheme import skips
from .weight import PackedWeight
from .writing import PackQuantizedWriter

if TYPE_CHECKING:
    from ..int4.tuning import Int4Tuner


class RoundingQuantizer(Quantizer):
    """A rank rounds its own part: its groups begin with its first column."""

    bits: ClassVar[int]

    def __init__(self, need: QuantizerNeed, options: RoundingOptions) -> None:
        self._options = options
        self._need = need
        self._dtype = need.dtype
        self._launcher = new_launcher(need, _table(options))
        self._device = torch_device(need.device)
        self._dense = DenseQuantizer.create(need, DenseOptions())

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: RoundingOptions) -> Sequence[str]:
        return path_refusals(need) + scheme_refusals(need) + table_refusals(need, _table(options))

    @classmethod
    def create(cls, need: QuantizerNeed, options: RoundingOptions) -> Self:
        return cls(need, options)

    @classmethod
    def writer(cls, method: str, options: RoundingOptions) -> PackQuantizedWriter:
        """For `pegboard quantize`. ConfigError: an unknown method."""
        return PackQuantizedWriter(cls.bits, method, options)

    def notes(self) -> Sequence[str]:
        return path_notes(self._need)

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return stored_names(spec)

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        if not any(self._rounds(spec)):
            return self._dense.bytes_for(spec, stored, shard)
        _, columns = input_part(spec, shard)
        size = element_bytes(self._dtype)
        group = columns if self._options.group == -1 else self._options.group
        tiled = self._tiled and serves(self.bits, columns, group, scale_dtype(self.bits).itemsize)
        a_group = scale_dtype(self.bits).itemsize + (0 if self._options.symmetric else 1)
        a_row = row_bytes(columns, self.bits) + -(-columns // group) * a_group
        total = 0
        for rounds, rows in self._runs(spec, shard):
            if rounds and tiled:
                total += tiled_bytes(rows, columns, group, ordered=False)
            else:
                total += rows * (a_row if rounds else columns * size)
        rows = shape_of(spec, shard)[0]
        return total + (rows * size if spec.bias else 0) + (rows * columns * size if spec.tied else 0)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> ShardLinear:
        if not any(self._rounds(spec)):
            return self._dense.linear(spec, checkpoint, shard)
        parts = read_dense(spec, checkpoint, shard, self._dtype, self._device)
        pieces: list[PackedWeight | TiledWeight | Tensor] = []
        for rounds, rows in self._runs(spec, shard):
            weight = parts.weight[sum(piece.shape[0] for piece in pieces) :][:rows]
            pieces.append(self._round(spec, weight) if rounds else weight.clone())
        return GroupLinear(
            PackedParts(
                weight=Pieces(pieces=tuple(pieces)),
                bias=parts.bias,
                all_reduce=parts.all_reduce,
                partition=parts.partition,
            ),
            self._launcher,
        )

    @property
    def _tiled(self) -> bool:
        return self._launcher is not None

    def _round(self, spec: LinearSpec, weight: Tensor) -> PackedWeight | TiledWeight:
        if not weight.isfinite().all():
            raise CheckpointError(f"{spec.name}: a weight is NaN or infinite in {self._dtype}: no grid holds it")
        options = self._options
        packed = round_to_nearest(weight, self.bits, options.group, symmetric=options.symmetric)
        return tile(packed) if self._tiled and serves_weight(packed) else packed

    def _rounds(self, spec: LinearSpec) -> list[bool]:
        """Whether each source is rounded: neither it nor the linear that it is part of is skipped."""
        skip = self._options.skip
        return [not skips(skip, spec.name) and not skips(skip, source) for source in spec.sources]

    def _runs(self, spec: LinearSpec, shard: Shard) -> list[tuple[bool, int]]:
        """(rounded, rows) of neighbouring sources that are alike."""
        runs: list[tuple[bool, int]] = []
        for rounds, (_, rows) in zip(self._rounds(spec), output_parts(spec, shard), strict=True):
            if runs and runs[-1][0] == rounds:
                runs[-1] = rounds, runs[-1][1] + rows
            else:
                runs.append((rounds, rows))
        return runs


def _table(options: RoundingOptions) -> Path | None:
    return options.table if isinstance(options, Rounding4Options) else None


class Int4Quantizer(RoundingQuantizer):
    bits = 4

    @classmethod
    def tuner(cls, need: QuantizerNeed, options: Rounding4Options) -> Int4Tuner:
        """For `pegboard tune`. ConfigError: the kernels don't run here."""
        return new_tuner(need, options.table, cls.create(need, options).kernel_shapes)

    def kernel_shapes(
        self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard
    ) -> list[tuple[int, int, int]]:
        """(outputs, inputs, columns a group) of what the kernels multiply."""
        _, columns = input_part(spec, shard)
        group = columns if self._options.group == -1 else self._options.group
        if not serves(self.bits, columns, group, scale_dtype(self.bits).itemsize):
            return []
        return [(rows, columns, groups_of(columns, group)[0]) for rounds, rows in self._runs(spec, shard) if rounds]


class Int8Quantizer(RoundingQuantizer):
    bits = 8
