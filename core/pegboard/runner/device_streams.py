"""Streams for engines. cuBLAS keeps memory for each stream that it was ever used in, so closed engines' serve again."""

from __future__ import annotations

import threading

import torch

_FREE: dict[str, list[torch.cuda.Stream]] = {}
_LOCK = threading.Lock()


def take_stream(device: str) -> torch.cuda.Stream:
    """One that no other engine uses."""
    with _LOCK:
        free = _FREE.setdefault(device, [])
        return free.pop() if free else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def give_stream(device: str, stream: torch.cuda.Stream) -> None:
    """Back, when nothing runs in it any more."""
    with _LOCK:
        _FREE[device].append(stream)
