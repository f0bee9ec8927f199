"""A file mapped into memory, and tensors that are views of it."""

from __future__ import annotations

import contextlib
import mmap
import sys
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pegboard.errors import CheckpointError

#: Linux's value; Python names it from 3.13 on. The mapping is never written, so no swap need be set aside for it.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0

#: Sizes beyond this are damage, also where another size is 0: torch could not even name such a shape.
MAX_ELEMENTS: Final = 1 << 48


class MappedFile:
    """Private (copy-on-write) map of a whole file: tensors are views without a copy, and a stray write never reaches
    the file.

    `close` unmaps at once when no view is alive; otherwise the last view that dies does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map: mmap.mmap | None = _map(file.fileno())
        except ValueError:
            raise CheckpointError(f"{path} is empty") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        self.size = len(self._map)
        # Every tensor is a part of this one, so that two which lie side by side can be seen as one.
        self._whole: Tensor | None = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))

    @property
    def buffer(self) -> mmap.mmap:
        if self._map is None:
            raise CheckpointError(f"{self.path} was closed")
        return self._map

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes], a view of the file from `offset`; the caller has checked the bounds."""
        if self._whole is None:
            raise CheckpointError(f"{self.path} was closed")
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # numpy holds an export of the map, so that it cannot be unmapped under a living tensor.
        return self._whole[offset : offset + nbytes]

    def close(self) -> None:
        mapped, self._map, self._whole = self._map, None, None
        if mapped is not None:
            # Refused while views are alive: they keep the map.
            with contextlib.suppress(BufferError):
                mapped.close()


def _map(fileno: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(fileno, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(fileno, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def as_dtype(stored: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """uint8 bytes seen as `dtype` in `shape`; copied only if the file placed them off alignment."""
    if stored.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    if stored.data_ptr() % dtype.itemsize:
        stored = stored.clone()
    return stored.view(dtype).view(shape)
