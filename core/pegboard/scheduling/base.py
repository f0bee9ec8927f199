"""Base of schedulers that keep their books in a ledger."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import Any, Self

from pegboard.contracts.cache import CacheManager
from pegboard.contracts.scheduler import (
    FinishReason,
    Progress,
    Scheduler,
    SchedulerNeed,
    SchedulerStats,
    SequenceSpec,
    StepPlan,
    StepResult,
)

from .ledger import Ledger


class LedgerScheduler(Scheduler):
    """All of the contract but the policy: derive, implement `schedule`, and `rank` if priority isn't all."""

    host_chooses = True

    def __init__(self, need: SchedulerNeed, options: Any, cache: CacheManager, clock: Callable[[], float]) -> None:
        self.options = options
        self.ledger = Ledger(need, cache, clock, self.rank)

    @classmethod
    def refusals(cls, need: SchedulerNeed, options: Any) -> Ids[str]:
        reasons = []
        if need.max_rows < 1:
            reasons.append(f"max_rows is {need.max_rows}; at least one row is needed")
        if need.max_step_tokens < 1:
            reasons.append(f"max_step_tokens is {need.max_step_tokens}; at least one token is needed")
        if need.max_queue < 1:
            reasons.append(f"max_queue is {need.max_queue}; without a place in it nothing can be admitted")
        return reasons

    @classmethod
    def create(cls, need: SchedulerNeed, options: Any, *, cache: CacheManager, clock: Callable[[], float]) -> Self:
        return cls(need, options, cache, clock)

    def rank(self, spec: SequenceSpec) -> float:
        """Lower runs earlier and is preempted later. Asked once, at admission."""
        return -spec.priority

    @abstractmethod
    def schedule(self) -> StepPlan | None: ...

    def add(self, sequences: Ids[SequenceSpec]) -> None:
        self.ledger.add(sequences)

    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        return self.ledger.finish(id, reason, error)

    def pause(self, id: str) -> bool:
        return self.ledger.pause(id)

    def resume(self, id: str) -> bool:
        return self.ledger.resume(id)

    def fork(self, parent: str, child: SequenceSpec, tokens: Ids[int] = ()) -> None:
        self.ledger.fork(parent, child, tokens)

    def extend(self, id: str, tokens: Ids[int]) -> None:
        self.ledger.extend(id, tokens)

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        return self.ledger.commit(result)

    def fail(self, step: int, error: str) -> None:
        self.ledger.fail(step, error)

    def is_live(self, id: str) -> bool:
        return self.ledger.is_live(id)

    def has_work(self) -> bool:
        return self.ledger.has_work()

    def next_deadline(self) -> float | None:
        return self.ledger.next_deadline()

    def stats(self) -> SchedulerStats:
        return self.ledger.stats()

    def check_integrity(self) -> None:
        self.ledger.check_integrity()
