"""Steps as CUDA graphs: recorded when a shape comes for the second time, replayed from then on."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import OrderedDict
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
    """Graphs by key. The first run of a key is a plain one, which compiles its kernels and so is the rehearsal; the
    second is recorded. A result keeps its addresses, and is valid until the next run of any key: all graphs share one
    pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()
        self._rehearsed: set[Hashable] = set()
        self._refused: set[Hashable] = set()

    def run(self, key: Hashable, work: Callable[[], ResultT]) -> ResultT:
        """What `work` launches must depend on `key` alone, and its inputs must keep their addresses."""
        found = self._graphs.get(key)
        if found is None:
            if key in self._refused or key not in self._rehearsed:
                self._rehearsed.add(key)
                return work()
            found = self._record(key, work)
            if found is None:
                return work()
        self._graphs.move_to_end(key)
        graph, kept = found
        graph.replay()
        result: ResultT = kept
        return result

    def _record(self, key: Hashable, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any] | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with _RECORDING, _no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        except Exception as error:
            self._refused.add(key)
            logger.warning("a step can't be recorded as a CUDA graph and is launched kernel by kernel: %s", error)
            return None
        while len(self._graphs) >= _MOST:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph, result
        return self._graphs[key]

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
