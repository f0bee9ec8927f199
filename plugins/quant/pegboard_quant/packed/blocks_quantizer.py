"""Quantizer `blocks-cuda`: GGUF blocks of 4 bits are multiplied as they are on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Self, TypeVar

import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.devices import torch_device
from pegboard.dtypes import element_bytes
from pegboard.errors import CheckpointError
from pegboard.linears import output_parts, read_blocks, scheme_refusals, shape_of, stored_names, weight_names

from ..dense import DenseQuantizer
from ..int4.choice import kernel_refusal, new_launcher
from ..int4.layout import TiledWeight, tile, tiled_bytes
from ..linears import ShardLinear
from ..options import BlocksCudaOptions, DenseOptions
from .gguf_blocks import GROUP, KINDS, BlockKind, read_blocks_as_codes
from .linear import GroupLinear, PackedParts, Pieces
from .quantizers import path_refusals

T = TypeVar("T")

logger = logging.getLogger("pegboard")

#: Weights of a linear from which the kernels are ahead of dense products. On an H200 the shapes of a Qwen3-0.6B, of up
#: to 6 million, lose by half at one row, those of a Llama-8B, from 17 million, gain.
_PACKED_FROM: Final = 1 << 23


class BlocksCudaQuantizer(Quantizer):
    """Keeps sources of types of `KINDS` in linears that are large enough: the weights are the file's (of Q4_K with
    scales and offsets rounded to float16), rounded to the dtype of activations as dense ones are, and take a third of
    their bytes. Others become dense, also beside them in one linear, and it says which have no kernel."""

    def __init__(self, need: QuantizerNeed, options: BlocksCudaOptions) -> None:
        self._need = need
        usual = 0 if need.objective == "memory" else _PACKED_FROM
        self._dense_below = usual if options.dense_below is None else options.dense_below
        self._launcher = new_launcher(need)
        self._device = torch_device(need.device)
        self._dense = DenseQuantizer.create(need, DenseOptions())
        self._told: set[str] = set()

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: BlocksCudaOptions) -> Sequence[str]:
        refusal = kernel_refusal(need)
        if refusal is not None:
            return [f"{refusal}: use 'none', or on a CPU 'blocks-cpu'"]
        reasons = path_refusals(need) + scheme_refusals(need)
        if need.storages.isdisjoint(KINDS):
            found = ", ".join(sorted(need.storages)) or "none"
            reasons.append(f"keeps GGUF blocks of {', '.join(KINDS)}; the checkpoint stores {found}: use 'none'")
        return reasons

    @classmethod
    def create(cls, need: QuantizerNeed, options: BlocksCudaOptions) -> Self:
        return cls(need, options)

    def notes(self) -> Sequence[str]:
        kept = sorted(self._need.storages & set(KINDS))
        rounded = "; scales and offsets of Q4_K are rounded to float16" if "Q4_K" in kept else ""
        packed = f"blocks of {' and '.join(kept)} stay packed and are multiplied by Triton kernels"
        small = f", and so do linears of fewer than {self._dense_below:,} weights" if self._dense_below else ""
        return [f"{packed}; others become dense{small}{rounded}"]

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return stored_names(spec)

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        kinds = self._kinds(spec, stored, shard)
        if not any(kinds):
            return self._dense.bytes_for(spec, stored, shard)
        rows, columns = shape_of(spec, shard)
        size = element_bytes(self._need.dtype)
        held = rows * size if spec.bias else 0
        for kind, parts in _runs(kinds, output_parts(spec, shard)):
            count = sum(length for _, length in parts)
            held += count * columns * size if kind is None else tiled_bytes(count, columns, GROUP, ordered=False)
        return held + (rows * columns * size if spec.tied else 0)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> ShardLinear:
        stored = checkpoint.tensors()
        kinds = self._kinds(spec, stored, shard)
        if not all(kinds) and self._is_large(spec, shard):
            self._tell(spec, stored, kinds)
        if not any(kinds):
            return self._dense.linear(spec, checkpoint, shard)
        sizes = [None if kind is None else (kind.columns, kind.nbytes) for kind in kinds]
        parts = read_blocks(spec, checkpoint, shard, self._need.dtype, self._device, blocks=sizes)
        pieces = tuple(self._piece(spec, kind, weights) for kind, weights in _runs(kinds, parts.weights))
        made = PackedParts(
            weight=Pieces(pieces=pieces), bias=parts.bias, all_reduce=parts.all_reduce, partition=parts.partition
        )
        return GroupLinear(made, self._launcher)

    def _is_large(self, spec: LinearSpec, shard: Shard) -> bool:
        rows, columns = shape_of(spec, shard)
        return rows * columns >= self._dense_below

    def _kinds(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> list[BlockKind | None]:
        """Of each source that stays packed: a rank has whole blocks of it, and the linear is large. None: it becomes
        dense."""
        names, columns = weight_names(spec), shape_of(spec, shard)[1]
        if not self._is_large(spec, shard):
            return [None] * len(names)
        kinds = [KINDS.get(stored[name].storage) if name in stored else None for name in names]
        return [None if kind is None or columns % kind.columns else kind for kind in kinds]

    def _piece(self, spec: LinearSpec, kind: BlockKind | None, weights: Sequence[Tensor]) -> TiledWeight | Tensor:
        whole = torch.cat([weight.to(self._device) for weight in weights])
        if kind is None:
            return whole
        try:
            return tile(read_blocks_as_codes(whole, kind))
        except CheckpointError as error:
            raise CheckpointError(f"{spec.name}: {error}; quantizer 'none' reads such weights") from None

    def _tell(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], kinds: Sequence[BlockKind | None]) -> None:
        names = [name for name, kind in zip(weight_names(spec), kinds, strict=True) if kind is None and name in stored]
        storages = " and ".join(sorted({stored[name].storage for name in names}))
        if storages not in self._told:
            self._told.add(storages)
            logger.warning(
                "%s holds %s in %d columns, for which quantizer 'blocks-cuda' has no kernel: they are dequantised to "
                "%s, and so are all such",
                spec.name,
                storages,
                spec.in_features,
                self._need.dtype,
            )


def _runs(kinds: Sequence[BlockKind | None], parts: Sequence[T]) -> Iterator[tuple[BlockKind | None, list[T]]]:
    """What sources have that follow each other and are of one kind."""
    for kind, run in groupby(zip(kinds, parts, strict=True), key=itemgetter(0)):
        yield kind, [part for _, part in run]
