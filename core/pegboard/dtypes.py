"""Names of number formats and what they mean. Records carry names ("bfloat16"), so that they stay free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from .errors import PegboardError

if TYPE_CHECKING:
    import torch

#: Formats in which activations are computed.
FLOAT_DTYPES: Final[tuple[str, ...]] = ("float16", "bfloat16", "float32", "float64")

#: Name -> bytes an element, for every dtype that a record may name.
ELEMENT_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "bool": 1,
    }
)


def element_bytes(name: str) -> int:
    """Bytes of one element of dtype `name`. PegboardError: an unknown name."""
    try:
        return ELEMENT_BYTES[name]
    except KeyError:
        raise PegboardError(f"unknown dtype {name!r}; known are {', '.join(ELEMENT_BYTES)}") from None


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name. PegboardError: an unknown name."""
    import torch

    element_bytes(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of torch's dtype, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")
