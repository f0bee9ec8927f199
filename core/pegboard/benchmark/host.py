"""Host time a step, by how many rows it has."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from ..contracts.observer import StepDone, StepTimes
from ..registry.hookspecs import hookimpl


class HostTime(msgspec.Struct, frozen=True, kw_only=True):
    """Of the steps with `rows` rows. Seconds; the phases are medians, and their sum is not the median of the sum."""

    rows: int
    steps: int
    #: The whole of a step, waiting included.
    step: float
    #: schedule + executor + commit + emit; None: the executor does not tell its part.
    median: float | None
    p90: float | None
    schedule: float
    executor: float | None
    commit: float
    emit: float
    #: In the executor, the model included; on a device that works by itself, host time as well.
    launch: float
    retire: float


class HostWatch:
    """An observer that keeps the times of every step."""

    def __init__(self) -> None:
        self._times: defaultdict[int, list[StepTimes]] = defaultdict(list)
        self._seconds: defaultdict[int, list[float]] = defaultdict(list)

    @hookimpl
    def pegboard_step_done(self, event: StepDone) -> None:
        self._times[event.rows].append(event.times)
        self._seconds[event.rows].append(event.seconds)

    def clear(self) -> None:
        self._times.clear()
        self._seconds.clear()

    def of(self, rows: int) -> HostTime | None:
        """None: no step had so many."""
        steps = list(self._times[rows])
        if not steps:
            return None

        def median(phase: str) -> float:
            return _percentile([getattr(times, phase) for times in steps], 0.5)

        told = all(times.executor is not None for times in steps)
        return HostTime(
            rows=rows,
            steps=len(steps),
            step=_percentile(list(self._seconds[rows]), 0.5),
            median=median("host") if told else None,
            p90=_percentile([times.host or 0.0 for times in steps], 0.9) if told else None,
            schedule=median("schedule"),
            executor=median("executor") if told else None,
            commit=median("commit"),
            emit=median("emit"),
            launch=median("launch"),
            retire=median("retire"),
        )


def _percentile(values: Sequence[float], share: float) -> float:
    """The least of them that `share` of them don't exceed."""
    return sorted(values)[math.ceil(len(values) * share) - 1]
