"""Recordings on a stand-in for torch's graphs, which refuses what torch's allocator refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from pegboard.runner.recording import Recordings


class Graph:
    """A recording that fails leaves the allocator recording into its pool, as CUDAGraph.capture_end does when the
    stream's capture was invalidated."""

    recording: ClassVar[set[int]] = set()
    #: Set by work that a stream can't record.
    broken: ClassVar[bool] = False

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if pool in Graph.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        Graph.recording.add(pool)
        self._pool = pool

    def capture_end(self) -> None:
        if Graph.broken:
            Graph.broken = False
            raise RuntimeError("operation failed due to a previous error during capture")
        Graph.recording.remove(self._pool)

    def replay(self) -> None: ...


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    handles = iter(range(100))

    def end(device: int, pool: int) -> None:
        if pool not in Graph.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        Graph.recording.remove(pool)

    Graph.recording.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)
    return Recordings()


def counting() -> tuple[list[int], Callable[[], Any]]:
    ran: list[int] = []
    return ran, lambda: ran.append(len(ran))


def breaks() -> None:
    Graph.broken = True


def test_the_first_run_is_plain_whatever_was_rehearsed(recordings: Recordings) -> None:
    recordings.rehearsed |= {"a", "b"}
    ran, work = counting()
    recordings.run(("a",), work)
    assert len(recordings) == 0
    recordings.run(("a",), work)
    recordings.run(("b",), work)
    assert len(recordings) == 2
    assert ran == [0, 1, 2]


def test_one_that_breaks_off_leaves_the_others_alone(recordings: Recordings, caplog: pytest.LogCaptureFixture) -> None:
    ran, work = counting()
    for _ in range(4):
        recordings.run(("broken",), breaks)
        Graph.broken = False  # launched kernel by kernel it does no harm
    assert len(recordings) == 0
    assert caplog.text.count("can't be recorded") == 1
    for _ in range(3):
        recordings.run(("fine",), work)
    assert len(recordings) == 1
    assert ran == [0, 1]
    assert not Graph.recording
