"""Quantizer `blocks-cpu`: GGUF blocks stay packed in memory, and are multiplied so."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from torch import Tensor
from torch.nn.functional import linear

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import Linear, LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.linears import (
    DenseParts,
    output_parts,
    read_blocks,
    read_dense,
    scheme_refusals,
    shape_of,
    stored_names,
    weight_names,
)

from . import team
from .blocks import BlocksLinear

if TYPE_CHECKING:
    from .block_kinds import Kind

T = TypeVar("T")

#: GGUF's names of the block types that have a kernel.
SERVED: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

logger = logging.getLogger("pegboard")


class BlocksCpuQuantizer(Quantizer):
    """Serves linears whose sources are all of types of `SERVED`; makes the others dense float32 and says so."""

    def __init__(self) -> None:
        from .block_product import Workplace

        self._workplace = Workplace()
        self._told: set[str] = set()

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: Any) -> Sequence[str]:
        if need.device.type != "cpu":
            return [f"has kernels for CPUs only, not for {need.device.type}: use quantizer 'none' there"]
        reasons = team.refusals() + scheme_refusals(need)
        if not reasons:
            from .block_kinds import REFUSAL

            reasons += [REFUSAL] if REFUSAL else []
        if need.dtype != "float32":
            reasons.append(f"computes between float32 activations only, not {need.dtype}: set dtype = 'float32'")
        if need.storages.isdisjoint(SERVED):
            found = ", ".join(sorted(need.storages)) or "none"
            reasons.append(f"keeps GGUF blocks of {', '.join(SERVED)}; the checkpoint stores {found}: use 'none'")
        return reasons

    @classmethod
    def create(cls, need: QuantizerNeed, options: Any) -> Self:
        return cls()

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return stored_names(spec)

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        from .block_records import records_bytes

        rows, columns = shape_of(spec, shard)
        dense, bias = 4 * rows * columns, 4 * rows if spec.bias else 0
        kinds = _kinds(spec, stored, shard)
        if kinds is None:
            return dense + bias
        held = sum(
            records_bytes(kind, sum(length for _, length in parts), columns)
            for kind, parts in _runs(kinds, output_parts(spec, shard))
        )
        return held + bias + (dense if spec.tied else 0)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> Linear:
        from .block_product import BlocksProduct

        kinds = _kinds(spec, checkpoint.tensors(), shard)
        if kinds is None:
            dense = read_dense(spec, checkpoint, shard, "float32", "cpu")
            self._tell(spec, checkpoint.tensors())
            return DenseLinear(dense)
        blocks = [(kind.columns, kind.file_bytes) for kind in kinds]
        parts = read_blocks(spec, checkpoint, shard, "float32", "cpu", blocks=blocks)
        products, start = [], 0
        for kind, weights in _runs(kinds, parts.weights):
            rows = sum(weight.shape[0] for weight in weights)
            bias = None if parts.bias is None else parts.bias[start : start + rows]
            products.append(BlocksProduct(self._workplace, kind, weights, bias))
            start += rows
        return BlocksLinear(products, shape_of(spec, shard), parts.bias, parts.partition, parts.all_reduce)

    def _tell(self, spec: LinearSpec, stored: Mapping[str, TensorInfo]) -> None:
        storages = " and ".join(sorted({stored[name].storage for name in weight_names(spec)}))
        if storages not in self._told:
            self._told.add(storages)
            logger.warning(
                "%s is stored as %s in %d columns, which quantizer 'blocks-cpu' does not keep: it is dequantised to "
                "float32, and so are all such",
                spec.name,
                storages,
                spec.in_features,
            )


class DenseLinear:
    """y = x W^T + b of this rank's part, in float32."""

    def __init__(self, parts: DenseParts) -> None:
        self.weight: Tensor | None = parts.weight
        self.bias = parts.bias
        self.out_features, self.in_features = parts.weight.shape
        self.partition = parts.partition
        self._weight, self._all_reduce = parts.weight, parts.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        if self._all_reduce is None:
            return linear(x, self._weight, self.bias)
        out = self._all_reduce(linear(x, self._weight))  # the bias once, not on every rank
        return out if self.bias is None else out + self.bias

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def _kinds(spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> list[Kind] | None:
    """The `Kind` of each source, all of which a rank has whole blocks of; None: it becomes dense."""
    from .block_kinds import KINDS

    columns, found = shape_of(spec, shard)[1], []
    for name in weight_names(spec):
        kind = KINDS.get(stored[name].storage) if name in stored else None
        if kind is None or columns % kind.columns:
            return None
        found.append(kind)
    return found


def _runs(kinds: Sequence[Kind], parts: Sequence[T]) -> Iterator[tuple[Kind, list[T]]]:
    """What sources have that follow each other and are of one kind."""
    for kind, run in groupby(zip(kinds, parts, strict=True), key=itemgetter(0)):
        yield kind, [part for _, part in run]
