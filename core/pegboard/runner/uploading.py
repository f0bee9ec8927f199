"""What the host tells the device each step, always at one address, so that recorded steps find it."""

from __future__ import annotations

from collections import deque

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor


class Uploads:
    """On CUDA a buffer of `capacity` numbers on the device, and as many pinned ones on the host as steps fly: one is
    used again when its copy is known to be over, for which nobody waits."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device, self._capacity = device, capacity
        self._target = torch.empty(capacity if device.type == "cuda" else 0, dtype=torch.int64, device=device)
        #: The oldest first.
        self._sent: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        #: What the device has now.
        self._there: NDArray[numpy.int64] | None = None

    def send(self, numbers: NDArray[numpy.int64]) -> Tensor:
        """[N] int64 on the device, valid until the next call in the order of the current stream. Nobody changes an
        array that was sent: the same one again is there already."""
        if self._device.type != "cuda":
            return torch.from_numpy(numbers)
        count = len(numbers)
        if numbers is self._there:
            return self._target[:count]
        self._there = None  # until the copy is on its way
        pinned, event = self._free()
        pinned.numpy()[:count] = numbers
        target = self._target[:count]
        target.copy_(pinned[:count], non_blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._sent.append((pinned, event))
        self._there = numbers
        return target

    def _free(self) -> tuple[Tensor, torch.cuda.Event]:
        if self._sent and self._sent[0][1].query():  # type: ignore[no-untyped-call]
            return self._sent.popleft()
        pinned = torch.empty(self._capacity, dtype=torch.int64, pin_memory=True)
        return pinned, torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self._target.nbytes
