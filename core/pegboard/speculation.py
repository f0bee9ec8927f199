"""What speculation has done since the engine was made. Imports no torch."""

from __future__ import annotations

from itertools import zip_longest

import msgspec

from .contracts.scheduler import DraftReport


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts by their place in a row's chain, and what they gain."""

    #: Steps that had drafts.
    steps: int = 0
    #: Rows that had a first, a second, ... draft, and those in which it was accepted.
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    #: As in the last step's DraftReport.
    allowed: int = 0
    predicted: float | None = None
    measured: float | None = None
    break_even: float | None = None

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of rows with a first, a second, ... draft that accepted it."""
        return tuple(right / there for right, there in zip(self.accepted, self.proposed, strict=True))

    @property
    def mean_length(self) -> float | None:
        """Tokens that a row with drafts keeps in a step, its own choice included; None: no row had any."""
        return 1 + sum(self.accepted) / self.proposed[0] if self.proposed else None


def add_drafts(stats: SpeculationStats, report: DraftReport) -> SpeculationStats:
    """The same after one step more."""
    return SpeculationStats(
        steps=stats.steps + bool(report.proposed),
        proposed=_sums(stats.proposed, report.proposed),
        accepted=_sums(stats.accepted, report.accepted),
        allowed=report.allowed,
        predicted=report.predicted,
        measured=report.measured,
        break_even=report.break_even,
    )


def _sums(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip_longest(first, second, fillvalue=0))
