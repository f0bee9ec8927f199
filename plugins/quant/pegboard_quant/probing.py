"""Trying torch's operators out before anybody relies on them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import TypeVar

Found = TypeVar("Found")


def probe(attempt: Callable[[], Found]) -> Callable[[], Found]:
    """Once a process, on a thread that ends: a thread that has multiplied keeps a team of OpenMP threads, and with more
    teams than cores the engine's own threads wait for each other twice as long."""

    @cache
    @wraps(attempt)
    def found() -> Found:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(attempt).result()

    return found
