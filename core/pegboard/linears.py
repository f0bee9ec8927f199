"""For quantizers: a linear's stored tensors, their names, and this rank's part of them, fused and in one dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import torch
from torch import Tensor

from .contracts.checkpoint import Checkpoint
from .contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from .errors import CheckpointError, ConfigError


class DenseParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a linear is made of: weight [O, I] and bias [O] of this rank; the weight may be a view of a mapped file."""

    weight: Tensor
    bias: Tensor | None
    #: Sums the ranks' results; None where there is nothing to sum.
    all_reduce: Callable[[Tensor], Tensor] | None
    partition: Literal["output", "input"] | None


def scheme_refusals(need: QuantizerNeed) -> list[str]:
    """Reasons for a quantizer that reads dense weights only; none when the checkpoint has nothing else."""
    method = need.scheme.get("quant_method")
    if method in (None, "none"):
        return []
    return [f"reads dense weights only; the checkpoint is quantized with {method!r}"]


def stored_names(spec: LinearSpec) -> tuple[str, ...]:
    """What `read_dense` reads: the weight of every source, and the biases."""
    return weight_names(spec) + (_names(spec, "bias") if spec.bias else ())


def weight_names(spec: LinearSpec) -> tuple[str, ...]:
    """The weight of every source, in order."""
    return _names(spec, "weight")


def shape_of(spec: LinearSpec, shard: Shard) -> tuple[int, int]:
    """[O, I] of this rank. ConfigError: it can't be split so."""
    return sum(length for _, length in output_parts(spec, shard)), input_part(spec, shard)[1]


def read_dense(spec: LinearSpec, checkpoint: Checkpoint, shard: Shard, dtype: str, device: str) -> DenseParts:
    """Read, take this rank's part, and join the sources of a dense linear; `dtype` and `device` as torch names them.

    CheckpointError for missing and wrong-shaped tensors, all of them named; ConfigError for what can't be split."""
    _check(spec, checkpoint)
    all_reduce, partition = reduction(spec, shard)
    parts, (column, columns) = output_parts(spec, shard), input_part(spec, shard)
    by_input = partition == "input"

    def read(name: str, start: int, length: int) -> Tensor:
        if by_input and name.endswith(".weight"):
            return checkpoint.read(name, dtype=dtype, device=device, dim=1, start=column, length=columns)
        return checkpoint.read(name, dtype=dtype, device=device, dim=0, start=start, length=length)

    def fused(suffix: str) -> Tensor:
        read_parts = [
            read(name, start, length) for name, (start, length) in zip(_names(spec, suffix), parts, strict=True)
        ]
        return _joined(read_parts)

    return DenseParts(
        weight=fused("weight"),
        bias=fused("bias") if spec.bias else None,
        all_reduce=all_reduce,
        partition=partition,
    )


def reduction(
    spec: LinearSpec, shard: Shard
) -> tuple[Callable[[Tensor], Tensor] | None, Literal["output", "input"] | None]:
    """(what sums the ranks' results, how the linear is split), both None for a whole one. ConfigError: the shard lacks
    the sum that it needs."""
    if shard.size == 1 or spec.partition is None:
        return None, None
    if spec.partition == "output":
        return None, "output"
    if shard.all_reduce is None:
        raise ConfigError(f"{spec.name} is split along its input over {shard.size} ranks: the shard needs all_reduce")
    return shard.all_reduce, "input"


def _joined(parts: list[Tensor]) -> Tensor:
    """All rows as one tensor: a view of the file where the checkpoint gave views that lie one behind the other, as gate
    and up do in most files; engines then share it."""
    first = parts[0]
    if len(parts) == 1:
        return first
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return torch.cat(parts)
        end += part.nbytes
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())


def _check(spec: LinearSpec, checkpoint: Checkpoint) -> None:
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


def output_parts(spec: LinearSpec, shard: Shard) -> list[tuple[int, int]]:
    """(start, length) of this rank's rows of each source. ConfigError: they can't be split so."""
    if spec.partition != "output":
        return [(0, rows) for rows in spec.out_features]
    return [
        _share(source, rows, spec.unit, shard) for source, rows in zip(spec.sources, spec.out_features, strict=True)
    ]


def input_part(spec: LinearSpec, shard: Shard) -> tuple[int, int]:
    """(start, length) of this rank's columns. ConfigError: they can't be split so."""
    if spec.partition != "input":
        return 0, spec.in_features
    return _share(spec.name, spec.in_features, 1, shard)
