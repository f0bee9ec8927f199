"""What a format has to tell: which tensors a matrix is stored in, and what they hold, as canonical rows of codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.errors import CheckpointError

SCALE_STORAGES: Final = ("float16", "bfloat16", "float32")


class Expected(msgspec.Struct, frozen=True):
    """Shape and storage types that a stored tensor may have."""

    shape: tuple[int, ...]
    storages: tuple[str, ...]


class SourceWeight(msgspec.Struct, frozen=True, kw_only=True):
    """One stored matrix, whole, its columns in their order: see `PackedWeight`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    #: int64 [I]: the group of each column; None: runs of whole groups.
    group_of: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """How a format stores the matrices of one module."""

    bits: int
    #: Columns a group, -1: all.
    group: int
    #: Whether zero points are stored.
    zeros: bool
    #: Whether columns belong to groups in any order (act-order).
    ordered: bool = False

    def columns_a_group(self, columns: int) -> int:
        return columns if self.group == -1 else self.group

    def groups(self, columns: int) -> int:
        return -(-columns // self.columns_a_group(columns))

    @abstractmethod
    def expected(self, source: str, rows: int, columns: int, names: Mapping[str, Any]) -> dict[str, Expected]:
        """The tensors that `read` reads of a matrix [rows, columns], given the names of all that are stored."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, source: str, rows: int, columns: int) -> SourceWeight: ...

    @property
    @abstractmethod
    def scales_name(self) -> str:
        """The suffix of the scales."""

    def group_of(self, name: str, stored: Tensor, columns: int) -> Tensor | None:
        """The checked group of each column; None where groups are runs. CheckpointError: there are no such groups, or
        they are no runs where the config says that they are."""
        groups, runs = stored.long(), torch.arange(columns) // self.columns_a_group(columns)
        if groups.numel() and (int(groups.min()) < 0 or int(groups.max()) >= self.groups(columns)):
            raise CheckpointError(f"{name} names groups outside of 0 to {self.groups(columns) - 1}")
        if self.ordered:
            return groups
        if not torch.equal(groups, runs):
            raise CheckpointError(f"{name} puts columns into groups out of order; desc_act in the config denies it")
        return None


def problems_of(expected: Mapping[str, Expected], stored: Mapping[str, TensorInfo]) -> list[str]:
    """What is missing, misshapen, or of a wrong type."""
    problems = []
    for name, right in expected.items():
        if name not in stored:
            problems.append(f"{name} {right.shape} is missing")
        elif tuple(stored[name].shape) != right.shape:
            problems.append(f"{name} has shape {tuple(stored[name].shape)}, expected {right.shape}")
        elif right.storages and stored[name].storage not in right.storages:
            problems.append(f"{name} is stored as {stored[name].storage}, expected {' or '.join(right.storages)}")
    return problems
