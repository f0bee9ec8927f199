"""How many drafts pay: from measured acceptance by place and the measured cost of steps.

A step of decode rows alone takes a + b R + e D seconds for R rows and D drafts; the three are fitted to the last steps.
With k drafts a row keeps E(k) = 1 + A_1 + ... + A_k tokens, A_j the share of rows that accept a j-th draft, and a step
costs c(k) = (a + b R + e R k) / (a + b R) plain ones: k is chosen where E(k) / c(k) is greatest, 0 where nothing gains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

import msgspec
import numpy

from pegboard.contracts.scheduler import DraftReport, RowPlan

#: Steps that the fit looks at, those that it needs, and plain ones among them without which nothing can be compared.
_WINDOW, _ENOUGH, _PLAIN = 64, 12, 2
#: A step in so many is plain, or has all drafts, where the other kind is too rare to be known.
_PROBE = 16
#: What one row leaves of older counts, and what is believed of acceptance before anything is known.
_KEEP, _PRIOR_ROWS, _PRIOR = 0.98, 2.0, 0.7
#: Gains below this share are noise.
_GAIN = 1.03


class _Step(msgspec.Struct, frozen=True):
    rows: int
    drafts: int
    kept: int
    seconds: float


class DraftLimits:
    """Of one engine. With `adapts` off it measures only, and every row has the drafts that it may have.

    Drafts that are trees have a `depth`: places are then those along a path, and a row has all drafts or none."""

    def __init__(self, most: int, adapts: bool, depth: int | None = None) -> None:
        self._most, self._adapts, self._depth = most, adapts, depth
        #: Numbers of drafts that a row may have, and the places that they reach.
        self._choices = {most: depth} if depth is not None else {count: count for count in range(1, most + 1)}
        self._steps: deque[_Step] = deque(maxlen=_WINDOW)
        places = most if depth is None else depth
        self._rows = numpy.full(places, _PRIOR_ROWS)
        self._accepted = _PRIOR_ROWS * _PRIOR ** numpy.arange(1, places + 1)
        self._asked = 0
        #: When the last step was known to be over.
        self._over = 0.0
        #: Drafts that a row gets now.
        self.allowed = most
        self.predicted: float | None = None
        self.measured: float | None = None
        self.break_even: float | None = None

    def next(self) -> int:
        """Drafts of a row in the step that is being built."""
        if not self._adapts:
            return self._most
        self._asked += 1
        if len(self._steps) < _ENOUGH or self._plain_steps() < _PLAIN:
            return 0 if self._asked % _PROBE >= _PROBE - _PLAIN else self.allowed
        return self._most if self._asked % _PROBE == 0 else self.allowed

    def begin(self, rows: Sequence[RowPlan], begin: float) -> MeasuredStep:
        """The rows of a step as they will run; it was begun at `begin`, before drafts were asked for."""
        return MeasuredStep(self, rows, begin)

    def by_place(self, drafts: Sequence[int]) -> list[int]:
        """Rows that have a draft in a first, a second, ... place, of rows with so many drafts."""
        reached = [count if self._depth is None else min(count, self._depth) for count in drafts]
        return [sum(places > place for places in reached) for place in range(max(reached, default=0))]

    def take(self, planned: Sequence[int], accepted: Sequence[int], step: _Step | None) -> None:
        """planned, accepted: rows with a draft in a first, a second, ... place, and those that accepted it. `step`: of
        decode rows alone."""
        if planned:
            rows, count = numpy.array(planned), len(planned)
            self._rows[:count] = self._rows[:count] * _KEEP**rows + rows
            self._accepted[:count] *= _KEEP**rows
            self._accepted[: len(accepted)] += accepted
        if step is not None:
            self._steps.append(step)
            if len(self._steps) >= _ENOUGH:
                self._weigh()

    def seconds(self, begin: float, end: float) -> float:
        """Of a step that was launched at `begin` and known to be over at `end`, without its wait for the one before."""
        spent = end - max(begin, self._over)
        self._over = end
        return spent

    def _plain_steps(self) -> int:
        return sum(not step.drafts for step in self._steps)

    def _weigh(self) -> None:
        facts = numpy.array([(1.0, step.rows, step.drafts) for step in self._steps])
        taken = numpy.array([step.seconds for step in self._steps])
        cost, *_ = numpy.linalg.lstsq(facts, taken, rcond=1e-9)
        # A step that something else held up says nothing
        taken = numpy.minimum(taken, 2 * numpy.maximum(facts @ cost, numpy.median(taken)))
        cost, *_ = numpy.linalg.lstsq(facts, taken, rcond=1e-9)
        rows = self._steps[-1].rows
        plain = float(cost[0] + cost[1] * rows)
        if plain <= 0 or not _PLAIN <= self._plain_steps() < len(self._steps):
            return
        more = max(float(cost[2]), 0.0) * rows / plain
        kept = 1 + numpy.cumsum(self._accepted / self._rows)
        gains = {0: 1.0} | {k: float(kept[places - 1]) / (1 + more * k) for k, places in self._choices.items()}
        best = max(gains, key=lambda count: gains[count])
        if self._adapts:
            self.allowed = best if gains[best] >= _GAIN else 0
        self.predicted, self.break_even = gains[self.allowed], 1 + more * (self.allowed or self._most)
        worth = sum(step.kept / step.rows * (cost[0] + cost[1] * step.rows) for step in self._steps)
        self.measured = float(worth / taken.sum())


class MeasuredStep:
    """One launched step."""

    def __init__(self, limits: DraftLimits, rows: Sequence[RowPlan], begin: float) -> None:
        self._limits, self._begin, self._end = limits, begin, 0.0
        drafts = [row.drafts for row in rows]
        self._planned, self._drafts, self._rows = limits.by_place(drafts), sum(drafts), len(rows)
        self._alone = all(
            row.samples and row.query == 1 + row.drafts and row.opening is None and not row.targets for row in rows
        )

    def launched(self) -> None:
        """The host was the device: the step is over."""
        self._end = perf_counter()

    def over(self, drafted: Sequence[int], kept: Sequence[int]) -> DraftReport:
        """Drafts that rows had, and tokens that they kept."""
        limits = self._limits
        proposed = limits.by_place(drafted)
        accepted = [sum(count - 1 > place for count in kept) for place in range(len(proposed))]
        seconds = limits.seconds(self._begin, self._end or perf_counter())
        step = _Step(self._rows, self._drafts, sum(kept), seconds) if self._alone else None
        limits.take(self._planned, accepted, step)
        return DraftReport(
            proposed=tuple(proposed),
            accepted=tuple(accepted),
            allowed=limits.allowed,
            predicted=limits.predicted,
            measured=limits.measured,
            break_even=limits.break_even,
        )
