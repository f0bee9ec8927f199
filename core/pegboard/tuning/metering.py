"""How long launches take on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

Calls = Sequence[Callable[[], object]]

#: Replays of which the median counts.
_REPEATS: Final = 5


class Meter(Protocol):
    """What `tune` measures with."""

    def prepare(self, calls: Calls) -> None:
        """Whatever these calls need to be compiled is, when this returns."""

    def microseconds(self, calls: Calls, target: float) -> float:
        """Time of one of these calls, on the device alone, from about `target` milliseconds of them at a time."""
        ...


class CudaMeter:
    """Times graphs of launches, which take no host time, with events. Works on torch's current stream of the device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def prepare(self, calls: Calls) -> None:
        from ..runner.compiling.ahead import Compilation

        compilation = Compilation(self._device)
        compilation.rehearse(lambda: [call() for call in calls])
        while not compilation.over():
            time.sleep(0.01)

    def microseconds(self, calls: Calls, target: float) -> float:
        import torch

        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            stream.synchronize()
            graph = _recorded(calls, 1, stream)
            _milliseconds(graph, stream)
            times = max(1, min(100, int(target / max(_milliseconds(graph, stream), 1e-3))))
            if times > 1:
                graph = _recorded(calls, times, stream)
                _milliseconds(graph, stream)
            found = statistics.median(_milliseconds(graph, stream) for _ in range(_REPEATS))
        return found * 1e3 / times / len(calls)


def _recorded(calls: Calls, times: int, stream: Any) -> Any:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            for call in calls:
                call()
    return graph


def _milliseconds(graph: Any, stream: Any) -> float:
    """Of one replay."""
    import torch

    before, after = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    before.record(stream)
    graph.replay()
    after.record(stream)
    stream.synchronize()
    return float(before.elapsed_time(after))
