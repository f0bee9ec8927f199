"""How long the phases of one step take: one look at the clock a phase, none a token."""

from __future__ import annotations

from time import perf_counter_ns

from .contracts.observer import StepTimes


class Stopwatch:
    """Starts when it is made; `lap` names the phase that ends now."""

    def __init__(self) -> None:
        self._begin = self._last = perf_counter_ns()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """`phase`: a field of StepTimes. Its time runs from the lap before."""
        now = perf_counter_ns()
        self._laps[phase] = (now - self._last) * 1e-9
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return (self._last - self._begin) * 1e-9

    def times(self, executor: float | None) -> StepTimes:
        """Once every phase had its lap."""
        return StepTimes(**self._laps, executor=executor)
