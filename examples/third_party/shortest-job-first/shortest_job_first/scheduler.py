"""Shortest job first: the mean time in a queue is least when the shortest goes first (Smith, 1956).

A job's cost is estimated from what is known when it comes: its prompt, and the output that it may have at most.
"""

from __future__ import annotations

from collections.abc import Callable

from pegboard.contracts.scheduler import SequenceSpec, StepPlan
from pegboard.scheduling import LedgerScheduler, Sequence, StepBuilder


class ShortestJobFirst(LedgerScheduler):
    """Rank = cost + ageing * arrival: as all that wait age alike, the order of two never changes, so it is asked once.
    Whoever came `cost / ageing` seconds earlier is ahead of any job that costs nothing: nobody starves."""

    def rank(self, spec: SequenceSpec) -> float:
        output = spec.max_length - len(spec.prompt)
        cost = len(spec.prompt) + self.options.output_cost * output
        return float(cost + self.options.ageing * spec.arrival)

    def schedule(self) -> StepPlan | None:
        """Decode rows first, each one token; then chunks of prompts and new sequences, shortest job first."""
        ledger, step = self.ledger, self.ledger.begin()
        for seq in sorted(ledger.running, key=lambda seq: seq.wants() > 1):
            self._advance(seq, step)
        while step.rows_left and step.tokens_left and (first := ledger.next_waiting()):
            if ledger.admit(first, step.tokens_left):
                step.add(first, min(first.wants(), step.tokens_left))
            elif not self._make_room(step, lambda other: other.paused):
                break
        return ledger.launch(step)

    def _advance(self, seq: Sequence, step: StepBuilder) -> None:
        """As many tokens of a running sequence as fit; longer jobs give their pages up for it."""
        if seq.phase != "running" or seq.paused:  # a shorter one has just taken its pages, or its reader is slow
            return
        query = min(seq.wants(), step.tokens_left)
        while query and not step.add(seq, query):
            if not self._make_room(step, lambda other: other.paused or other.key > seq.key):
                return

    def _make_room(self, step: StepBuilder, may_lose: Callable[[Sequence], bool]) -> bool:
        if self.ledger.cache.stats().fenced:  # pages are on their way back already
            return False
        for seq in self.ledger.running.backwards():
            if may_lose(seq) and not step.planned(seq):
                self.ledger.preempt(seq)
                return True
        return False
