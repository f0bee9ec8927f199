"""Compiles Triton kernels into Triton's cache on disk.

A program of its own, run by `workers.CompileWorkers`: it imports Triton and the modules of kernels, no torch unless
they do, and touches no device.

Requests come on stdin: eight bytes of length, then a pickle of its parent; the first is `sys.path`, the others are what
`triton.compile` takes. The reply is one byte: KEPT or FAILED."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
from types import ModuleType
from typing import Any, BinaryIO

KEPT, FAILED = b"\1", b"\0"
LENGTH_BYTES = 8


class _Request(pickle.Unpickler):
    """Functions of kernels come by name."""

    def persistent_load(self, pid: tuple[str, str]) -> Any:
        from triton.runtime.jit import JITFunction

        module, qualname = pid
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
        while not isinstance(found, JITFunction):  # a tuner, or a heuristic, around it
            found = found.fn
        return found


def settle_keys(function: Any, seen: set[int]) -> None:
    """Gives the functions that a kernel's function calls their keys before its own: Triton's key of a function has the
    constants of those alone that had a key already, and so depends on what was compiled before, unless this is done.
    `seen`: ids of functions that are done."""
    from triton.runtime.jit import JITFunction

    if id(function) in seen:
        return
    seen.add(id(function))
    names = function.fn.__code__.co_names
    for value in (function.fn.__globals__.get(name) for name in names):
        called = [getattr(value, name, None) for name in names] if isinstance(value, ModuleType) else [value]
        for one in called:
            if isinstance(one, JITFunction):
                settle_keys(one, seen)
    _ = function.cache_key  # computed and kept


def _read(stream: BinaryIO) -> bytes | None:
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length)) if len(length) == LENGTH_BYTES else None


def _compile(data: bytes, seen: set[int]) -> bytes:
    import triton

    try:
        source, target, options = _Request(io.BytesIO(data)).load()
        settle_keys(source.fn, seen)
        triton.compile(source, target=target, options=options)
    except Exception:
        return FAILED  # the parent compiles it itself, and so finds the error where it belongs
    return KEPT


def main() -> None:
    replies = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no reply
    path = _read(sys.stdin.buffer)
    if path is None:
        return
    sys.path[:] = pickle.loads(path)
    import triton  # noqa: F401 - while there is nothing to do yet

    seen: set[int] = set()
    while (data := _read(sys.stdin.buffer)) is not None:
        os.write(replies, _compile(data, seen))


if __name__ == "__main__":
    main()
