"""A dense quantizer whose linears keep statistics of what they are given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..contracts.checkpoint import Checkpoint, TensorInfo
from ..contracts.part import Part
from ..contracts.quantizer import LinearSpec, LinearStatistics, Quantizer, QuantizerNeed, Shard
from ..devices import torch_device
from ..dtypes import element_bytes
from ..linears import DenseParts, read_dense, scheme_refusals, shape_of, stored_names
from ..registry.hookspecs import hookimpl

#: Of the part.
NAME: Final = "recording"


class Book:
    """Which linears keep statistics now, and what they have seen so far."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._rows: dict[str, int] = {}
        self._open: frozenset[str] = frozenset()

    def open(self, names: Collection[str]) -> None:
        """Forget everything and note what these linears are given from now on."""
        self._sums.clear()
        self._rows.clear()
        self._open = frozenset(names)

    def note(self, name: str, x: Tensor) -> None:
        if name not in self._open:
            return
        x = x.float()
        if name not in self._sums:
            self._sums[name] = x.new_zeros(x.shape[1], x.shape[1]), x.new_zeros(x.shape[1])
            self._rows[name] = 0
        moment, magnitude = self._sums[name]
        moment.addmm_(x.T, x)
        magnitude.add_(x.abs().sum(0))
        self._rows[name] += x.shape[0]

    def close(self, name: str) -> LinearStatistics | None:
        """What it has seen, which is forgotten. None: nothing, as an expert that no token chose."""
        rows = self._rows.pop(name, 0)
        if not rows:
            return None
        moment, magnitude = self._sums.pop(name)
        self._open -= {name}
        with torch.inference_mode():  # as they were made, in a step
            return LinearStatistics(moment=moment.div_(rows).cpu(), magnitude=magnitude.div_(rows).cpu())


class RecordingLinear:
    """Gives no `weight` away: whatever reads it must come by."""

    weight: Tensor | None = None

    def __init__(self, name: str, parts: DenseParts, book: Book) -> None:
        self._name, self._weight, self._book = name, parts.weight, book
        self.bias = parts.bias
        self.out_features, self.in_features = parts.weight.shape
        self.partition: Literal["output", "input"] | None = parts.partition

    def __call__(self, x: Tensor) -> Tensor:
        self._book.note(self._name, x)
        return linear(x, self._weight, self.bias)

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class RecordingQuantizer(Quantizer):
    book: ClassVar[Book]

    def __init__(self, need: QuantizerNeed) -> None:
        self._dtype = need.dtype
        self._device = torch_device(need.device)

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: None) -> Sequence[str]:
        return scheme_refusals(need)

    @classmethod
    def create(cls, need: QuantizerNeed, options: None) -> Self:
        return cls(need)

    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return stored_names(spec)

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        rows, columns = shape_of(spec, shard)
        matrices = 2 if spec.tied else 1
        return (matrices * rows * columns + (rows if spec.bias else 0)) * element_bytes(self._dtype)

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> RecordingLinear:
        return RecordingLinear(spec.name, read_dense(spec, checkpoint, shard, self._dtype, self._device), self.book)


def recording_plugin(book: Book) -> object:
    """A plugin with the part `NAME`, whose linears write into `book`."""
    quantizer = type("Recording", (RecordingQuantizer,), {"book": book})

    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> Sequence[Part]:
            return (Part(role="quantizer", name=NAME, factory=quantizer, summary="keeps statistics of inputs"),)

    return Plugin()


def batches(names: Sequence[tuple[str, int]], budget: int) -> list[list[str]]:
    """(linear, input features) in runs whose moments take `budget` bytes at most; one alone may take more."""
    runs: list[list[str]] = []
    taken = budget + 1
    for name, features in names:
        size = features * features * torch.float32.itemsize
        if taken + size > budget:
            runs.append([])
            taken = 0
        runs[-1].append(name)
        taken += size
    return runs
