"""Quantizer `blocks-cuda`: GGUF blocks of 4 bits are multiplied as they are on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, Quantizer, QuantizerNeed, Shard
from pegboard.dtypes import element_bytes
from pegboard.linears import read_blocks, scheme_refusals, shape_of, stored_names, weight_names

from ..dense import DenseQuantizer
from ..int4.choice import kernel_refusal, new_launcher
from ..int4.layout import tile, tiled_bytes
from ..linears import ShardLinear
from ..options import DenseOptions
from .gguf_blocks import BLOCK, KINDS, BlockKind, read_blocks_as_codes
from .linear import GroupLinear, PackedParts, Pieces
from .quantizers import path_refusals

logger = logging.getLogger("pegboard")


class BlocksCudaQuantizer(Quantizer):
    """Serves linears whose sources are all of one type of `KINDS`: the weights are the file's, rounded to the dtype of
    activations as dense ones are, and take a third of their bytes. Others become dense, and it says so."""

    def __init__(self, need: QuantizerNeed) -> None:
        self._need = need
        self._launcher = new_launcher(need)
        self._device = f"{need.device.type}:{need.device.index}" if need.device.type == "cuda" else need.device.type
        self._dense = DenseQuantizer.create(need, DenseOptions())
        self._told: set[str] = set()

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: None) -> Sequence[str]:
        refusal = kernel_refusal(need)
        if refusal is not None:
            return [f"{refusal}: use 'none', or on a CPU 'blocks-cpu'"]
        reasons = path_refusals(need) + scheme_refusals(need)
        if need.storages.isdisjoint(KINDS):
            found = ", ".join(sorted(need.storages)) or "none"
            reasons.append(f"keeps GGUF blocks of {', '.join(KINDS)}; the checkpoint stores {found}: use 'none'")
        return reasons

    @classmethod
    def create(cls, need: QuantizerNeed, options: None) -> Self:
        return cls(need)

    def notes(self) -> Sequence[str]:
        kept = sorted(self._need.storages & set(KINDS))
        return [f"blocks of {' and '.join(kept)} stay packed and are multiplied by Triton kernels; others become dense"]

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return stored_names(spec)

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        if _kind(spec, stored, shard) is None:
            return self._dense.bytes_for(spec, stored, shard)
        rows, columns = shape_of(spec, shard)
        size = element_bytes(self._need.dtype)
        table = rows * columns * size if spec.tied else 0
        return tiled_bytes(rows, columns, BLOCK, ordered=False) + (rows * size if spec.bias else 0) + table

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> ShardLinear:
        stored = checkpoint.tensors()
        kind = _kind(spec, stored, shard)
        if kind is None:
            self._tell(spec, stored)
            return self._dense.linear(spec, checkpoint, shard)
        parts = read_blocks(
            spec, checkpoint, shard, self._need.dtype, self._device, block=BLOCK, block_bytes=kind.nbytes
        )
        blocks = torch.cat([part.to(self._device) for part in parts.weights])
        weight = Pieces(pieces=(tile(read_blocks_as_codes(blocks, kind)),))
        made = PackedParts(weight=weight, bias=parts.bias, all_reduce=parts.all_reduce, partition=parts.partition)
        return GroupLinear(made, self._launcher)

    def _tell(self, spec: LinearSpec, stored: Mapping[str, TensorInfo]) -> None:
        storages = " and ".join(sorted({stored[name].storage for name in weight_names(spec) if name in stored}))
        if storages not in self._told:
            self._told.add(storages)
            logger.warning(
                "%s is stored as %s, for which quantizer 'blocks-cuda' has no kernel: it is dequantised to %s, and so "
                "are all such",
                spec.name,
                storages,
                self._need.dtype,
            )


def _kind(spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> BlockKind | None:
    """Of all its sources, which a rank has whole blocks of; None: it becomes dense."""
    storages = {stored[name].storage if name in stored else None for name in weight_names(spec)}
    if len(storages) > 1 or shape_of(spec, shard)[1] % BLOCK:
        return None
    return KINDS.get(storages.pop() or "")
