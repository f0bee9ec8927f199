"""From files to a device at the speed of the storage or the bus: many parts at a time, through pinned memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from pegboard.errors import CheckpointError

#: One thread reads at 2 to 4 GB/s from the system's page cache; a bus takes 25 to 55.
_THREADS = 8
_PART = 16 << 20
#: Fewer bytes are not worth it.
WORTH = 1 << 20


class _Slot:
    """Pinned memory that one part is read into, and the stream that takes it away."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(_PART, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DeviceReads:
    """Two slots a thread: one is read into while the other one's copy flies."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(2 * _THREADS):
            self._slots.put(_Slot(self._device))
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pegboard-read")

    @staticmethod
    def possible(device: str) -> bool:
        return device.startswith("cuda") and hasattr(os, "preadv")

    def read(self, path: Path, offset: int, target: Tensor) -> None:
        """Fills target [N], uint8 on the device, from the file; done when it returns. CheckpointError: it can't be
        read, or ends too early."""
        parts = range(0, target.numel(), _PART)
        before = torch.cuda.current_stream(self._device)
        free = before.record_event()  # the memory may still be in use by what ran here
        with path.open("rb", buffering=0) as file:
            descriptor = file.fileno()
            jobs = [
                self._pool.submit(self._move, descriptor, offset + first, target[first : first + _PART], free)
                for first in parts
            ]
            try:
                streams = [job.result() for job in jobs]
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
            finally:
                for job in jobs:
                    job.exception()  # the file stays open until nobody reads it
        for stream in streams:
            before.wait_stream(stream)
        before.synchronize()

    def _move(self, descriptor: int, offset: int, target: Tensor, free: torch.cuda.Event) -> torch.cuda.Stream:
        slot = self._slots.get()
        try:
            slot.stream.synchronize()  # what was in this slot has left it
            count, memory = target.numel(), slot.memory.numpy().data
            done = 0
            while done < count:
                got = os.preadv(descriptor, [memory[done:count]], offset + done)
                if not got:
                    raise OSError(f"it ends at {offset + done}, {count - done} bytes early")
                done += got
            slot.stream.wait_event(free)
            with torch.cuda.stream(slot.stream):
                target.copy_(slot.memory[:count], non_blocking=True)
            return slot.stream
        finally:
            self._slots.put(slot)

    def close(self) -> None:
        self._pool.shutdown()
        while not self._slots.empty():
            self._slots.get()
