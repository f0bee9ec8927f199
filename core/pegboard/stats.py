"""What an engine says of itself while it runs."""

from __future__ import annotations

from .contracts.scheduler import SchedulerStats
from .contracts.shadow import ShadowStats
from .speculation import SpeculationStats


class EngineStats(SchedulerStats, frozen=True, kw_only=True):
    """Sequences now, and what shadow mode and speculation have found so far."""

    #: One a shadowed part; empty without shadow mode.
    shadow: tuple[ShadowStats, ...] = ()
    #: None: no speculator runs.
    speculation: SpeculationStats | None = None
