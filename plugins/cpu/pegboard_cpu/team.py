"""Running a compiled kernel on the threads that torch computes with.

numba's own threading layers would bring a second team: with more threads in teams than cores, waiting ones sleep
instead of spinning. Kernels here are plain functions of one pointer, as the regions are that a compiler outlines for
OpenMP, and torch's OpenMP runtime runs them on the calling thread's team, the one that its own operators use.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@cache
def _runtime() -> ctypes.CDLL | None:
    """torch's library; a name is looked up in what it is linked to as well, so in its own OpenMP runtime."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


@cache
def address_of(name: str) -> int | None:
    """Where the function `name` of torch's OpenMP runtime lies; None: there is none."""
    try:
        return ctypes.cast(getattr(_runtime(), name), ctypes.c_void_p).value
    except AttributeError:
        return None


def refusals() -> list[str]:
    """Why kernels can't run on torch's threads here; empty: they can."""
    missing = [
        name for name in ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num") if address_of(name) is None
    ]
    return [f"needs torch's OpenMP runtime to have {' and '.join(missing)}, as on Linux"] if missing else []


class Kernel:
    """A compiled function void(void *) with room for what it reads there: 8 bytes an argument, as `layout` says in the
    letters of `struct`: q for whole numbers and addresses, d for fractions.

    Has one caller at a time: whoever makes it (a part of an engine) calls it from the thread that steps."""

    def __init__(self, compiled: Any, layout: str) -> None:
        region = address_of("GOMP_parallel")
        if region is None:
            raise OSError("; ".join(refusals()))
        packing = struct.Struct(f"={layout}")
        self._buffer = ctypes.create_string_buffer(packing.size)
        self._pack = packing.pack_into
        self._region = _Region(region)
        self._compiled = compiled  # keeps the code alive
        self._call = (compiled.address, ctypes.addressof(self._buffer))

    def __call__(self, threads: int, *arguments: float) -> None:
        """Run on at most `threads` threads, the caller's among them; how many they are, and which it is, each asks
        OpenMP (`team_size`, `thread_number`)."""
        self._pack(self._buffer, 0, *arguments)
        self._region(*self._call, threads, 0)
