"""The phases of a step with the failure policy around them.

A part that raises fails the requests that it touched; their pages come back; the engine goes on. If the parts'
own integrity check fails after that, nothing can be trusted any more and the engine dies with EngineDead.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from .contracts.executor import Executor
from .contracts.scheduler import FinishReason, Progress, Scheduler, StepPlan, StepResult
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
        #: Sequences that are live, for the case that the scheduler itself fails.
        self.live: set[str] = set()

    def schedule(self) -> StepPlan | None:
        with self.lock:
            try:
                return self.scheduler.schedule()
            except Exception as error:
                self._fail_all("scheduling", error)
                return None

    def launch(self, plan: StepPlan | None) -> None:
        if plan is None:
            return
        try:
            self.executor.launch(plan)
            self._flying.append(plan)
        except Exception as error:
            self._fail_step(plan, "running a step", error)

    def retire(self, plan: StepPlan | None) -> StepResult | None:
        """Waits for the oldest step when more than `depth` fly, or when nothing new was launched."""
        try:
            retired = self.executor.retire(self._depth if plan is not None else 0)
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
                touched = [] if retired is None else [row.id for row in retired.rows]
                self._fail(touched, "committing a step", error)
                outcome = self._rest()
            self.live.difference_update(p.id for p in outcome if p.finish_reason is not None)
            return outcome

    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        with self.lock:
            return self.scheduler.finish(id, reason, error)

    @property
    def idle(self) -> bool:
        return not self._flying and not self.scheduler.has_work()

    def _rest(self) -> tuple[Progress, ...]:
        """What the scheduler still has to say after it failed to commit a step."""
        try:
            return self.scheduler.commit(None)
        except Exception as error:
            raise EngineDead(f"the scheduler can't commit any more: {error!r}") from error

    def _fail_step(self, plan: StepPlan, doing: str, error: Exception) -> None:
        with self.lock:
            logger.error("%s failed; %d requests end with an error", doing, len(plan.rows), exc_info=error)
            try:
                self.scheduler.fail(plan.id, _reason(doing, error))
            except Exception as second:
                raise EngineDead(f"the scheduler can't take a failed step back: {second!r}") from second
            self._check(error)

    def _fail_all(self, doing: str, error: Exception) -> None:
        self._fail(sorted(self.live), doing, error)

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
