"""The header of one safetensors file, checked against the file before any tensor is touched.

Layout: 8 bytes little-endian header size, a JSON object {name: {dtype, shape, data_offsets}}, then the data, which
the tensors must cover without gap or overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch

from pegboard.checkpoints.mapped import MAX_ELEMENTS, MappedFile
from pegboard.errors import CheckpointError

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}

#: The format's own limit.
_MAX_HEADER = 100_000_000
_POINTER = b"version https://git-lfs"


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: Place in the file, bytes.
    offset: int
    nbytes: int


def read_header(file: MappedFile) -> dict[str, StoredTensor]:
    """Every tensor of the file. CheckpointError for a file that is truncated, damaged, or of another kind."""
    where = f"{file.path} is not a whole safetensors file"
    if file.size < 8:
        raise CheckpointError(f"{where}: {file.size} bytes cannot hold a header")
    if bytes(file.buffer[: len(_POINTER)]) == _POINTER:
        raise CheckpointError(f"{file.path} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`")
    length = int.from_bytes(file.buffer[:8], "little")
    if length > _MAX_HEADER:
        raise CheckpointError(f"{where}: its header would be {length} bytes, the format allows {_MAX_HEADER}")
    if 8 + length > file.size:
        raise CheckpointError(f"{where}: its header ends at byte {8 + length}, the file at {file.size} (truncated?)")
    try:
        header = json.loads(file.buffer[8 : 8 + length], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _stored(f"{where}: tensor {name!r}", entry, 8 + length) for name, entry in header.items()}
    _check_cover(where, tensors, 8 + length, file.size)
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def _stored(where: str, entry: Any, base: int) -> StoredTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} has no dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise CheckpointError(f"{where} has dtype {kind!r}; supported: {', '.join(DTYPES)}")
    if not _counts(shape) or math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{where} has shape {shape!r}; expected a list of sizes that a file can hold")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {offsets!r}; expected [begin, end]")
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(f"{where} of shape {shape} in {kind} takes {nbytes} bytes, its offsets say {offsets}")
    return StoredTensor(dtype=dtype, shape=tuple(shape), offset=base + offsets[0], nbytes=nbytes)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(where: str, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    end, before = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(f"{where}: tensor {name!r} {fault} {before}")
        end, before = tensor.offset + tensor.nbytes, f"tensor {name!r}"
    if end > size:
        raise CheckpointError(f"{where}: its data ends at byte {end}, the file at {size} (truncated?)")
    if end < size:
        raise CheckpointError(f"{where}: {size - end} bytes follow the last tensor")
