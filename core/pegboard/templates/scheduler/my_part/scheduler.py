"""Who runs, and how many tokens. Slots, pages, steps in flight, deadlines and forks are the ledger's business."""

from __future__ import annotations

from collections.abc import Callable

from pegboard.contracts.scheduler import SequenceSpec, StepPlan
from pegboard.scheduling import LedgerScheduler, Sequence, StepBuilder


class MyPart(LedgerScheduler):
    """Short prompts go first. A step has every decode row, then chunks of prompts while tokens are left."""

    def rank(self, spec: SequenceSpec) -> float:
        """Asked once a sequence; lower runs earlier and gives its pages up later. A priority is worth an hour."""
        waiting = spec.arrival - 3600.0 * spec.priority
        return float(len(spec.prompt) + self.options.ageing * waiting)

    def schedule(self) -> StepPlan | None:
        ledger, step = self.ledger, self.ledger.begin()
        for seq in sorted(ledger.running, key=lambda seq: seq.wants() > 1):  # decode rows, then prefill chunks
            self._advance(seq, step)
        while step.rows_left and step.tokens_left and (first := ledger.next_waiting()):
            if ledger.admit(first, step.tokens_left):
                step.add(first, min(first.wants(), step.tokens_left))
            elif not self._make_room(step, lambda other: other.paused):
                break
        return ledger.launch(step)

    def _advance(self, seq: Sequence, step: StepBuilder) -> None:
        """As many tokens of a running sequence as fit; those behind it give their pages up for it."""
        if seq.phase != "running" or seq.paused:  # preempted by one before it, or waiting for its reader
            return
        query = min(seq.wants(), step.tokens_left)
        while query and not step.add(seq, query):
            if not self._make_room(step, lambda other: other.paused or other.key > seq.key):
                return

    def _make_room(self, step: StepBuilder, may_lose: Callable[[Sequence], bool]) -> bool:
        """Take the pages of the last in line that may lose them; False: nobody did."""
        if self.ledger.cache.stats().fenced:  # pages are on their way back already
            return False
        for seq in self.ledger.running.backwards():
            if may_lose(seq) and not step.planned(seq):
                self.ledger.preempt(seq)
                return True
        return False
