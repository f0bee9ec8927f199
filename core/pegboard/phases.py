"""The phases of a step with the failure policy around them.

A part that raises fails the requests that it touched; their pages come back; the engine goes on. If the parts'
own integrity check fails after that, nothing can be trusted any more and the engine dies with EngineDead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque

from .contracts.executor import Executor
from .contracts.scheduler import FinishReason, Progress, Scheduler, SchedulerStats, StepPlan, StepResult
from .errors import EngineDead

logger = logging.getLogger("pegboard")


class Phases:
    """Owns the scheduler and the executor, and the lock that serialises calls into the scheduler."""

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int) -> None:
        #: Held for host work only, never while the device works.
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.executor = executor
        self._depth = depth
        #: Steps launched and not retired, and who is in them.
        self._flying: deque[StepPlan] = deque()
        #: The last step that was planned.
        self._last = 0
        #: Sequences that are live, for the case that the scheduler itself fails.
        self.live: set[str] = set()

    def schedule(self) -> StepPlan | None:
        with self.lock:
            try:
                plan = self.scheduler.schedule()
            except Exception as error:
                self._fail_all("scheduling", error)
                return None
            if plan is not None:
                self._last = plan.id
            return plan

    def launch(self, plan: StepPlan | None) -> None:
        if plan is None:
            return
        try:
            self.executor.launch(plan)
            self._flying.append(plan)
        except EngineDead:
            raise
        except Exception as error:
            self._fail_step(plan, "running a step", error)

    def retire(self, plan: StepPlan | None) -> StepResult | None:
        """Waits for the oldest step when more than `depth` fly, or when nothing new was launched."""
        try:
            retired = self.executor.retire(self._depth if plan is not None else 0)
        except EngineDead:
            raise
        except Exception as error:
            self._fail_step(self._flying.popleft(), "reading a step's result", error)
            return None
        if retired is not None:
            self._flying.popleft()
        return retired

    def commit(self, retired: StepResult | None) -> tuple[Progress, ...]:
        with self.lock:
            try:
                outcome = self.scheduler.commit(retired)
            except Exception as error:
                outcome = self._recover(retired, error)
            self.live.difference_update(p.id for p in outcome if p.finish_reason is not None)
            return outcome

    def _recover(self, retired: StepResult | None, error: Exception) -> tuple[Progress, ...]:
        """After `commit` raised, before or after it had taken the step in."""
        doing = "committing a step"
        if retired is None:
            self._fail_all(doing, error)
        else:
            self._lose(retired.step, _reason(doing, error))
            self._fail([row.id for row in retired.rows if row.id in self.live], doing, error)
        try:
            outcome = self.scheduler.commit(None)
        except Exception as second:
            raise EngineDead(f"the scheduler can't commit any more: {second!r}") from second
        told = {progress.id for progress in outcome if progress.finish_reason is not None}
        # The end of these was lost with what raised.
        lost = [id for id in sorted(self.live - told) if not self.scheduler.is_live(id)]
        return (*outcome, *(Progress(id=id, finish_reason="error", error=_reason(doing, error)) for id in lost))

    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        with self.lock:
            return self.scheduler.finish(id, reason, error)

    def abandon(self, reason: str) -> None:
        """The engine ends: let go of everything that is live, as far as the scheduler still can."""
        with self.lock, contextlib.suppress(Exception):
            for id in sorted(self.live):
                self.scheduler.finish(id, "error", reason)

    @property
    def idle(self) -> bool:
        with self.lock:
            return not self._flying and not self.scheduler.has_work()

    def next_deadline(self) -> float | None:
        with self.lock:
            return self.scheduler.next_deadline()

    def stats(self) -> SchedulerStats:
        with self.lock:
            return self.scheduler.stats()

    def _fail_step(self, plan: StepPlan, doing: str, error: Exception) -> None:
        with self.lock:
            logger.error("%s failed; %d requests end with an error", doing, len(plan.rows), exc_info=error)
            try:
                self.scheduler.fail(plan.id, _reason(doing, error))
            except Exception as second:
                raise EngineDead(f"the scheduler can't take a failed step back: {second!r}") from second
            self._check(error)

    def _fail_all(self, doing: str, error: Exception) -> None:
        """With the lock held. A plan that got lost on its way here is in flight as far as the scheduler knows."""
        self._lose(self._last + 1, _reason(doing, error))
        self._fail(sorted(self.live), doing, error)

    def _lose(self, step: int, reason: str) -> None:
        try:
            self.scheduler.fail(step, reason)
            self._last = max(self._last, step)
        except ValueError:
            pass  # it is not in flight
        except Exception as second:
            raise EngineDead(f"the scheduler can't take a failed step back: {second!r}") from second

    def _fail(self, ids: list[str], doing: str, error: Exception) -> None:
        """With the lock held."""
        logger.error("%s failed; %d requests end with an error", doing, len(ids), exc_info=error)
        try:
            for id in ids:
                self.scheduler.finish(id, "error", _reason(doing, error))
        except Exception as second:
            raise EngineDead(f"the scheduler can't end its requests: {second!r}") from second
        self._check(error)

    def _check(self, cause: Exception) -> None:
        try:
            self.scheduler.check_integrity()
        except Exception as broken:
            raise EngineDead(f"state is damaged after {cause!r}: {broken}") from cause


def _reason(doing: str, error: Exception) -> str:
    return f"{doing} failed: {type(error).__name__}: {error}"
