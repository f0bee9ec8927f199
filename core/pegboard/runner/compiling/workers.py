"""Processes that compile kernels: in threads of this one, compilers and requests would fight for Python's lock."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import queue
import subprocess
import sys
import threading
from typing import Any

from . import worker

#: A Llama's kernels take some 25 s of processor time, the longest of them 4.
MOST = 12


def count_wanted() -> int:
    """As many as there are processors for this process."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, MOST)


class CompileWorkers:
    """Begins its processes at the first kernel that is not in Triton's cache on disk."""

    def __init__(self, count: int) -> None:
        self._count = count
        #: None, which stays there: nobody need wait, there are none.
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._all: list[_Worker] | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Idempotent. Nothing where this program's interpreter can't be run again."""
        with self._lock:
            if self._all is None:
                self._all = []
                frozen = not sys.executable or getattr(sys, "frozen", False)
                with contextlib.suppress(OSError):  # no more of them can be had
                    for _ in range(0 if frozen else self._count):
                        self._all.append(_Worker())
                for one in self._all:
                    self._idle.put(one)
                if not self._all:
                    self._idle.put(None)

    def compile(self, source: Any, target: Any, options: dict[str, Any]) -> bool:
        """`triton.compile`, into the cache. False: nothing is there, and the caller compiles it; so it is with
        functions that can't be imported by name, with errors, and when the workers are gone. Blocks while all are
        busy."""
        try:
            request = _pickled((source, target, options))
        except (pickle.PicklingError, AttributeError, TypeError):
            return False
        self.begin()
        one = self._idle.get()
        try:
            return one is not None and one.ask(request)
        finally:
            self._idle.put(one)

    def close(self) -> None:
        with self._lock:
            running, self._all = self._all, []
        self._idle.put(None)
        for one in running or ():
            one.close()


class _Worker:
    def __init__(self) -> None:
        # A session of its own: an interrupt at the keyboard is its parent's, whose end it sees in its input
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-P", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        with contextlib.suppress(OSError):
            self._send(self._process, pickle.dumps(sys.path))

    def ask(self, request: bytes) -> bool:
        process = self._process
        if process is None or process.stdout is None:
            return False
        try:
            self._send(process, request)
            return process.stdout.read(1) == worker.KEPT
        except (OSError, ValueError):  # it is gone
            return False

    @staticmethod
    def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
        if process.stdin is not None:
            # Both are small against a pipe's buffer; unbuffered writes may be partial
            left = memoryview(len(data).to_bytes(worker.LENGTH_BYTES) + data)
            while left:
                left = left[process.stdin.write(left) :]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        from triton.runtime.jit import JITFunction

        if not isinstance(obj, JITFunction):
            return None
        module, qualname = obj.fn.__module__, obj.fn.__qualname__
        if module == "__main__" or "<" in qualname:
            raise pickle.PicklingError(f"{module}.{qualname} can't be imported")
        return module, qualname


def _pickled(request: Any) -> bytes:
    made = io.BytesIO()
    _Pickler(made).dump(request)
    return made.getvalue()


def is_kept(cache_key: str, name: str) -> bool:
    """Whether Triton's cache on disk has the kernel; False, too, where that can't be told."""
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    if knobs.compilation.always_compile:
        return False
    manager = get_cache_manager(hashlib.sha256(cache_key.encode()).hexdigest())
    return bool(manager.get_group(f"{name[:150]}.json"))
