"""A clock that tests move by hand."""

from __future__ import annotations


class FakeClock:
    """Callable like time.monotonic; seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock does not go back {-seconds} seconds")
        self.now += seconds
