"""How far to draft ahead: as long as the target takes."""

from __future__ import annotations

import torch

#: Fewer passes give nothing: one for the token that the target adds, another for a draft behind it.
_LEAST = 2
#: Of a pass: less idle time than the first is being late, more than the second is time for one more.
_LATE, _EARLY = 0.1, 1.2


def adjusted(ahead: int, passes: float, span: float, busy: float) -> int:
    """Passes ahead of the next step, of a step that had `ahead`: what a pass takes, and from when the drafts were sent
    the time until the target had verified them, and that for which this device was busy, in one unit."""
    if ahead < _LEAST:
        fits = int(span / passes)
        return fits if fits >= _LEAST else 0
    idle = (span - busy) / passes
    ahead += (idle > _EARLY) - (idle < _LATE)
    return ahead if ahead >= _LEAST else 0


class Pace:
    """`ahead` follows from the last step whose times are known, without waiting for any."""

    def __init__(self) -> None:
        self.ahead = 0
        #: What was measured of a pass at last, in milliseconds.
        self._pass: float | None = None
        self._steps: list[_Step] = []

    def arrived(self) -> None:
        """The stream has what the last step kept."""
        self._steps.append(_Step(self.ahead, self._mark()))
        if len(self._steps) > 2:
            self._adjust(*self._steps[:2])
            del self._steps[0]

    def drafted(self, passes: int) -> None:
        self._steps[-1].passes, self._steps[-1].sent = passes, self._mark()

    def ended(self) -> None:
        """What is drafted ahead is launched."""
        self._steps[-1].ended = self._mark()

    def _adjust(self, step: _Step, after: _Step) -> None:
        if not after.arrived.query():  # type: ignore[no-untyped-call]
            return
        if step.passes:
            self._pass = step.arrived.elapsed_time(step.sent) / step.passes
        if self._pass:
            span, busy = step.sent.elapsed_time(after.arrived), step.sent.elapsed_time(step.ended)
            self.ahead = adjusted(step.ahead, self._pass, span, busy)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class _Step:
    def __init__(self, ahead: int, arrived: torch.cuda.Event) -> None:
        self.ahead, self.arrived, self.passes = ahead, arrived, 0
        self.sent = self.ended = arrived
