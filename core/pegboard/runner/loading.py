"""Where loading computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Made = TypeVar("Made")
Progress = Callable[[int, int], None]


class _GivenUp(Exception):
    """Nobody waits for what is being loaded."""


def load_apart(make: Callable[[Progress], Made], progress: Progress | None) -> Made:
    """`make(progress)` on a thread that ends with it; raises what it raises.

    OpenMP keeps a team of threads for every thread that has computed. With more threads in teams than cores, waiting
    ones sleep instead of spinning, and a decode step of a small model takes twice as long: the step's thread is to
    have the only team. Who stops waiting (Ctrl-C) stops the loading at its next report of progress."""
    given_up = threading.Event()

    def report(done: int, total: int) -> None:
        if given_up.is_set():
            raise _GivenUp
        if progress is not None:
            progress(done, total)

    with ThreadPoolExecutor(1, thread_name_prefix="pegboard-load") as thread:
        try:
            return thread.submit(make, report).result()
        except BaseException:
            given_up.set()
            raise
