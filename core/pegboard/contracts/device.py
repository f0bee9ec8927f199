"""The device and number format that parts are asked to serve. Dtypes are named as torch names them."""

from __future__ import annotations

import msgspec


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What assembly knows about the device before anything is loaded."""

    #: "cpu" or "cuda"
    type: str
    index: int = 0
    name: str = ""
    #: (major, minor) compute capability on CUDA, None elsewhere.
    capability: tuple[int, int] | None = None
    #: Bytes in all and free at the time of assembly.
    total_bytes: int = 0
    free_bytes: int = 0


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Name, shape and dtype of a tensor that somebody else allocates."""

    name: str
    shape: tuple[int, ...]
    dtype: str
