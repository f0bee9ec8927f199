"""The header of one GGUF file: metadata and tensor places, every count and offset checked against the file.

Layout (versions 2 and 3, little endian): magic, version, tensor count, key count; the keys with typed values; the
tensors' names, sizes, types and offsets; padding; the data. Arrays are walked, not built, until they are asked for:
a vocabulary has hundreds of thousands of strings.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from pegboard.checkpoints.mapped import MAX_ELEMENTS, MappedFile
from pegboard.errors import CheckpointError

MAGIC: Final = b"GGUF"

#: Type id -> name, elements a block, bytes a block.
BLOCK_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

#: Value type id -> struct format; 8 is a string, 9 an array.
_SCALARS: Final[Mapping[int, str]] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor. `shape` in row-major order: the reverse of the file's."""

    type: str
    shape: tuple[int, ...]
    #: Elements and bytes of one block.
    block: int
    block_bytes: int
    #: Place in the file, bytes.
    offset: int
    nbytes: int


class _LazyArray(msgspec.Struct, frozen=True):
    type: int
    count: int
    offset: int


class GGUFHeader:
    """`metadata` (a lazy mapping) and `tensors` of one mapped file."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._at = 0
        if file.size < 4 or file.buffer[:4] != MAGIC:
            raise CheckpointError(f"{file.path} is not a GGUF file: it starts with {file.buffer[:4]!r}, not {MAGIC!r}")
        self._at = 4
        self._check_version(self._scalar("I"))
        tensors, keys = self._scalar("Q"), self._scalar("Q")
        # A key takes at least 13 bytes (length, type, one byte), a tensor 24.
        self._room(keys * 13 + tensors * 24, "its counts")
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string("a key")
            if key in values:
                raise self._damaged(f"the key {key!r} appears twice")
            values[key] = self._value(key)
        self.metadata: Mapping[str, Any] = _Metadata(self, values)
        self.tensors = self._read_tensors(tensors)

    def load(self, array: _LazyArray) -> list[Any]:
        """The values of an array that was walked over before."""
        buffer, at = self._file.buffer, array.offset
        if array.type != _STRING:
            return list(struct.unpack_from(f"<{array.count}{_SCALARS[array.type]}", buffer, at))
        strings = []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(array.count):
            end = at + 8 + length_at(buffer, at)[0]
            strings.append(self._decode(at + 8, end, "an array of strings"))
            at = end
        return strings

    def _check_version(self, version: int) -> None:
        if version in (2 << 24, 3 << 24):
            raise CheckpointError(f"{self._file.path} is a big-endian GGUF file; only little-endian ones are read")
        if version not in (2, 3):
            raise CheckpointError(f"{self._file.path} has GGUF version {version}; supported: 2, 3")

    def _read_tensors(self, count: int) -> dict[str, StoredBlocks]:
        found: dict[str, StoredBlocks] = {}
        for _ in range(count):
            name = self._string("a tensor's name")
            if name in found:
                raise self._damaged(f"the tensor {name!r} appears twice")
            found[name] = self._tensor(name)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, not a power of two")
        base = -(-self._at // alignment) * alignment
        end, before = base, "the header"
        for name, tensor in sorted(found.items(), key=lambda item: item[1].offset):
            start = base + tensor.offset
            if start % alignment or start < end:
                fault = f"overlaps {before}" if start < end else f"is not aligned to {alignment} bytes"
                raise self._damaged(f"tensor {name!r} {fault}")
            end, before = start + tensor.nbytes, f"tensor {name!r}"
            if end > self._file.size:
                raise self._damaged(f"{before} ends at byte {end}, the file at {self._file.size} (truncated?)")
            found[name] = msgspec.structs.replace(tensor, offset=start)
        return found

    def _tensor(self, name: str) -> StoredBlocks:
        dimensions = self._scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions; the format allows {_MAX_DIMENSIONS}")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
            raise self._damaged(f"tensor {name!r} has the impossible shape {shape}")
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in BLOCK_TYPES:
            known = ", ".join(name for name, _, _ in BLOCK_TYPES.values())
            raise self._damaged(f"tensor {name!r} has the type {kind}, which is not read; supported: {known}")
        label, block, block_bytes = BLOCK_TYPES[kind]
        if (shape[-1] if shape else 1) % block:
            raise self._damaged(f"tensor {name!r} of shape {shape} has rows that are no multiple of {label}'s {block}")
        nbytes = math.prod(shape) // block * block_bytes
        return StoredBlocks(type=label, shape=shape, block=block, block_bytes=block_bytes, offset=offset, nbytes=nbytes)

    def _value(self, key: str) -> Any:
        kind = self._scalar("I")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise self._damaged(f"the key {key!r} has the unknown value type {kind}")
        element, count = self._scalar("I"), self._scalar("Q")
        array = _LazyArray(element, count, self._at)
        if element in _SCALARS:
            nbytes = count * struct.calcsize(_SCALARS[element])
            self._room(nbytes, key)
            self._at += nbytes
        elif element == _STRING:
            self._room(count * 8, key)
            self._skip_strings(count, key)
        else:
            raise self._damaged(f"the key {key!r} is an array of the unknown value type {element}")
        return array

    def _skip_strings(self, count: int, key: str) -> None:
        buffer, at, size = self._file.buffer, self._at, self._file.size
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size:
                break
            at += 8 + length_at(buffer, at)[0]
        self._room(at - self._at, key)
        self._at = at

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        self._room(size, "a number")
        (value,) = struct.unpack_from(f"<{code}", self._file.buffer, self._at)
        self._at += size
        return value

    def _string(self, what: str) -> str:
        length = self._scalar("Q")
        self._room(length, what)
        self._at += length
        return self._decode(self._at - length, self._at, what)

    def _decode(self, start: int, end: int, what: str) -> str:
        try:
            return str(self._file.buffer[start:end], "utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is not valid UTF-8") from None

    def _room(self, nbytes: int, what: str) -> None:
        if self._at + nbytes > self._file.size:
            raise self._damaged(f"the file ends at byte {self._file.size}, inside {what} (truncated?)")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path} is not a whole GGUF file: {reason}")


class _Metadata(Mapping[str, Any]):
    """Keys to values; an array is read from the file each time it is asked for."""

    def __init__(self, header: GGUFHeader, values: Mapping[str, Any]) -> None:
        self._header = header
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return self._header.load(value) if isinstance(value, _LazyArray) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
