"""Steps as CUDA graphs: recorded when all of it has run before, replayed from then on."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

logger = logging.getLogger("pegboard")

#: One recording at a time in this process: they share allocator state.
_RECORDING = threading.Lock()
#: Graphs that an engine keeps; the one that was not used for longest goes first.
_MOST = 128

ResultT = TypeVar("ResultT")


class Recordings:
    """Graphs by key, the parts of which are run together. A part's first run is a plain one, which compiles its kernels
    and so is its rehearsal; what has only rehearsed parts is recorded. The very first run is a plain one, whatever was
    rehearsed in another thread: in this one cuBLAS makes what it can't make while a stream is recorded. A result keeps
    its addresses, and is valid until the next run of any key: all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()
        #: Parts of keys that have run.
        self.rehearsed: set[Hashable] = set()
        #: Keys, and how often they could not be recorded: after a rehearsal apart something may be missing still.
        self._failures: Counter[Hashable] = Counter()
        self._begun = False

    def run(self, key: tuple[Hashable, ...], work: Callable[[], ResultT]) -> ResultT:
        """What `work` launches must depend on `key` alone, and its inputs must keep their addresses."""
        found = self._graphs.get(key)
        if found is None:
            if not self._begun or self._failures[key] > 1 or not self.rehearsed.issuperset(key):
                self._begun = True
                self.rehearsed.update(key)
                return work()
            found = self._record(key, work)
            if found is None:
                return work()
        self._graphs.move_to_end(key)
        graph, kept = found
        graph.replay()
        result: ResultT = kept
        return result

    def _record(self, key: tuple[Hashable, ...], work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any] | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with _RECORDING, _no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        except Exception as error:
            self._leave_pool()
            self._failures[key] += 1
            if self._failures[key] > 1:
                logger.warning("a step can't be recorded as a CUDA graph and is launched kernel by kernel: %s", error)
            return None
        while len(self._graphs) >= _MOST:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph, result
        return self._graphs[key]

    def _leave_pool(self) -> None:
        """A recording that breaks off leaves torch's allocator in the middle of it, which would refuse every other one
        into the same pool."""
        with contextlib.suppress(RuntimeError):  # it had ended it, or not begun
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self._pool)  # as torch.cuda.use_mem_pool does
            torch._C._cuda_releasePool(device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collection may free what CUDA does not let go of while it records."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
