"""Arguments that every reader's `read` shares."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

import torch

from pegboard.contracts.checkpoint import TensorInfo
from pegboard.errors import CheckpointError


def find_tensor(tensors: Mapping[str, TensorInfo], name: str, path: Path) -> TensorInfo:
    info = tensors.get(name)
    if info is None:
        near = difflib.get_close_matches(name, tensors, n=3)
        hint = f"; the nearest names are {', '.join(near)}" if near else ""
        raise CheckpointError(f"{path} holds no tensor {name!r}{hint}")
    return info


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is not a torch dtype; expected a name such as 'bfloat16' or 'float32'")
    return dtype


def resolve_range(info: TensorInfo, dim: int, start: int, length: int | None) -> tuple[int, int, int]:
    """(dim, start, length) with defaults filled in; CheckpointError if the tensor has no such part."""
    shape = info.shape
    if not shape:
        if (dim, start) == (0, 0) and length is None:
            return 0, 0, 1
        raise CheckpointError(f"tensor {info.name} is a scalar and cannot be narrowed")
    if not -len(shape) <= dim < len(shape):
        raise CheckpointError(f"tensor {info.name} of shape {shape} has no dimension {dim}")
    dim %= len(shape)
    if length is None:
        length = shape[dim] - start
    if start < 0 or length < 0 or start + length > shape[dim]:
        raise CheckpointError(
            f"tensor {info.name} of shape {shape} has no range [{start}, {start + length}) along dimension {dim}"
        )
    return dim, start, length
