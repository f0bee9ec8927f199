"""Static batching: a batch runs until its last sequence ends, then comes the next. The baseline to compare with."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.contracts.cache import CacheManager
from pegboard.contracts.scheduler import SchedulerNeed, StepPlan
from pegboard.scheduling import LedgerScheduler, StepBuilder

from .options import StaticOptions
from .rows import free_a_slot, plan_running, preempt_paused, prefill_limit


class StaticScheduler(LedgerScheduler):
    """A batch fills until it has `batch` sequences, nobody waits, or the next one finds no pages. Children of n > 1
    whose parent is still prefilling come with a later batch."""

    def __init__(
        self, need: SchedulerNeed, options: StaticOptions, cache: CacheManager, clock: Callable[[], float]
    ) -> None:
        self._batch = min(options.batch or need.max_rows, need.max_rows)
        #: Sequences that the batch may still take.
        self._open = 0
        super().__init__(need, options, cache, clock)

    def schedule(self) -> StepPlan | None:
        step = self.ledger.begin()
        stats = self.ledger.stats()
        if not stats.preempted and not self.ledger.active:
            self._open = self._batch  # who is paused may wait for one of those outside: for a beam, say
            free_a_slot(self.ledger)
        plan_running(self.ledger, step, None)
        self._admit(step)
        return self.ledger.launch(step)

    def _admit(self, step: StepBuilder) -> None:
        ledger = self.ledger
        while step.rows_left and step.tokens_left:
            seq = ledger.next_waiting(fresh=self._open > 0)
            if seq is None:
                self._open = 0
                return
            fresh = seq.phase == "waiting"
            if ledger.admit(seq, prefill_limit(step, None, step.tokens_left)):
                self._open -= fresh
                step.add(seq, prefill_limit(step, None, seq.wants()))
            elif not preempt_paused(ledger):
                self._open = 0
                return
