"""Continuous batching: sequences join and leave at every step (Yu et al. 2022, Orca), prompts run in chunks."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.contracts.cache import CacheManager
from pegboard.contracts.scheduler import SchedulerNeed, SequenceSpec, StepPlan
from pegboard.scheduling import LedgerScheduler, StepBuilder

from .options import ContinuousOptions
from .rows import free_a_slot, plan_running, preempt_paused, prefill_limit


class ContinuousScheduler(LedgerScheduler):
    """Decode rows first, then chunks of running prompts, then new sequences as long as tokens, rows and pages last.

    Rank is priority plus time waited: with `ageing_seconds` a, a request of priority p that came d seconds earlier runs
    before one of priority p + 1 if d > a. The first in line is never passed by one behind it that would fit.
    """

    def __init__(
        self, need: SchedulerNeed, options: ContinuousOptions, cache: CacheManager, clock: Callable[[], float]
    ) -> None:
        self._chunk = options.chunk
        self._ageing = options.ageing_seconds
        self._keep = int(options.watermark * cache.stats().total)
        super().__init__(need, options, cache, clock)

    def rank(self, spec: SequenceSpec) -> float:
        # Everyone ages alike, so the order of two never changes and the arrival says it once and for all.
        return -spec.priority if self._ageing is None else spec.arrival / self._ageing - spec.priority

    def schedule(self) -> StepPlan | None:
        step = self.ledger.begin()
        plan_running(self.ledger, step, self._chunk)
        self._admit(step)
        return self.ledger.launch(step)

    def _admit(self, step: StepBuilder) -> None:
        ledger = self.ledger
        free_a_slot(ledger)
        while step.rows_left and step.tokens_left:
            seq = ledger.next_waiting()
            if seq is None:
                return
            keep = self._keep if ledger.active else 0
            if ledger.admit(seq, prefill_limit(step, self._chunk, step.tokens_left), keep):
                step.add(seq, prefill_limit(step, self._chunk, seq.wants()))
            elif not preempt_paused(ledger):
                return
