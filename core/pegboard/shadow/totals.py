"""What shadow mode has found since the engine was made. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from msgspec.structs import replace

from ..contracts.executor import Executor, ExecutorNeed, MemoryReport
from ..contracts.scheduler import StepPlan, StepResult
from ..contracts.shadow import ShadowCheck, ShadowStats
from ..plan import ChosenPart

logger = logging.getLogger("pegboard")


class ShadowTotals:
    """Written by the step's thread; `stats` may be asked from any."""

    def __init__(self, references: Mapping[str, str]) -> None:
        """Shadowed part -> its reference."""
        self._stats = {part: ShadowStats(part=part, reference=name) for part, name in references.items()}

    def stats(self) -> tuple[ShadowStats, ...]:
        return tuple(self._stats.values())

    def take(self, result: StepResult) -> None:
        for check in result.shadow:
            before = self._stats[check.part]
            after = _sum(before, check, result.step)
            self._stats[check.part] = after
            if _is_news(before.differing, after.differing):
                logger.warning(
                    "shadow mode: %s differs from %s in %d of %d results, by up to %.3g (%.3g times the tolerance); "
                    "here at step %d, %s",
                    *(check.part, after.reference, after.differing, after.compared, after.max_abs, after.worst),
                    *(result.step, check.first),
                )


def _sum(stats: ShadowStats, check: ShadowCheck, step: int) -> ShadowStats:
    return replace(
        stats,
        steps=stats.steps + 1,
        compared=stats.compared + check.compared,
        differing=stats.differing + check.differing,
        failed=stats.failed + (check.error is not None),
        max_abs=max(stats.max_abs, check.max_abs),
        worst=max(stats.worst, check.worst),
        first=stats.first or (f"step {step}, {check.first}" if check.first else ""),
    )


def _is_news(before: int, after: int) -> bool:
    """The first, and whenever their number has doubled."""
    return before.bit_length() != after.bit_length()


def count_shadow(executor: Executor, parts: Mapping[str, ChosenPart]) -> tuple[CountedExecutor, ShadowTotals]:
    """`parts` as in the plan."""
    shadowed = {where: part.name for where, part in parts.items() if where.startswith("shadow.")}
    totals = ShadowTotals({where.removeprefix("shadow."): name for where, name in shadowed.items()})
    return CountedExecutor(executor, totals), totals


class CountedExecutor(Executor):
    """An executor whose findings are added up before anybody sees the tokens of their step."""

    def __init__(self, executor: Executor, totals: ShadowTotals) -> None:
        self._executor, self._totals = executor, totals

    @classmethod
    def refusals(cls, need: ExecutorNeed, options: Any) -> NoReturn:
        raise NotImplementedError("made around another executor")

    @classmethod
    def create(
        cls,
        need: ExecutorNeed,
        options: Any,
        *,
        plan: Callable[[], bytes],
        restore: Callable[[], Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> NoReturn:
        raise NotImplementedError("made around another executor")

    @property
    def flying(self) -> int:
        return self._executor.flying

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)

    def retire(self, depth: int) -> StepResult | None:
        result = self._executor.retire(depth)
        if result is not None:
            self._totals.take(result)
        return result

    def memory(self) -> MemoryReport:
        return self._executor.memory()

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        return self._executor.unused_tensors

    def close(self) -> None:
        self._executor.close()
