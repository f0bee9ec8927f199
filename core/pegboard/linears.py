"""For quantizers: a linear's stored tensors, their names, and this rank's part of them, fused and in one dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class BlockParts(msgspec.Struct, frozen=True, kw_only=True):
    """As `DenseParts`, of sources that stay in blocks, or of which some do."""

    #: Of each source uint8 [O, bytes of this rank's columns], or dense [O, I]; may be views of a mapped file.
    weights: tuple[Tensor, ...]
    bias: Tensor | None
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
    reading = _Reading(spec, checkpoint, shard)
    return DenseParts(
        weight=_joined([reading.part(name, dtype, device) for name in weight_names(spec)]),
        bias=reading.bias(dtype, device),
        all_reduce=reading.all_reduce,
        partition=reading.partition,
    )


def read_blocks(
    spec: LinearSpec,
    checkpoint: Checkpoint,
    shard: Shard,
    dtype: str,
    device: str,
    *,
    blocks: Sequence[tuple[int, int] | None],
) -> BlockParts:
    """As `read_dense`, without dequantising: each source's blocks hold so many numbers in so many bytes, as `blocks`
    says in the order of the sources; a source that has None there is read dense.
    `dtype` and `device` are the bias's and dense sources'; blocks are on the CPU. ConfigError as well for a rank's
    columns that are no whole blocks."""
    reading = _Reading(spec, checkpoint, shard)
    return BlockParts(
        weights=tuple(
            reading.part(name, dtype, device) if sizes is None else reading.blocks(name, *sizes)
            for name, sizes in zip(weight_names(spec), blocks, strict=True)
        ),
        bias=reading.bias(dtype, device),
        all_reduce=reading.all_reduce,
        partition=reading.partition,
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


class _Reading:
    """What is read of a linear for this rank. Raises as `read_dense`."""

    def __init__(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> None:
        _check(spec, checkpoint)
        self.all_reduce, self.partition = reduction(spec, shard)
        self._by_input = self.partition == "input"
        self._spec, self._checkpoint = spec, checkpoint
        self._rows = dict(zip(spec.sources, output_parts(spec, shard), strict=True))
        self._columns = input_part(spec, shard)

    def part(self, name: str, dtype: str, device: str) -> Tensor:
        """This rank's part of a weight or a bias."""
        source, _, suffix = name.rpartition(".")
        by_column = self._by_input and suffix == "weight"
        start, length = self._columns if by_column else self._rows[source]
        return self._checkpoint.read(name, dtype=dtype, device=device, dim=int(by_column), start=start, length=length)

    def blocks(self, name: str, numbers: int, nbytes: int) -> Tensor:
        """This rank's part of a weight whose blocks have so many numbers and bytes."""
        (column, columns), (start, rows) = self._columns, self._rows[name.rpartition(".")[0]]
        if column % numbers or columns % numbers:
            raise ConfigError(f"{self._spec.name}: {columns} columns a rank are no whole blocks of {numbers}")
        first, width = column // numbers * nbytes, columns // numbers * nbytes
        return self._checkpoint.read_blocks(name)[start : start + rows, first : first + width]

    def bias(self, dtype: str, device: str) -> Tensor | None:
        if not self._spec.bias:
            return None
        return _joined([self.part(name, dtype, device) for name in _names(self._spec, "bias")])


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
