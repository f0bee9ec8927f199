"""Executors: where the runner lives. Local, N ranks, another host: the engine can't tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec

from .device import DeviceFacts
from .scheduler import StepPlan, StepResult


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the executor's device."""

    weights: int
    kv_cache: int
    workspace: int


class ExecutorNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor is asked to serve, before the plan is made."""

    device: DeviceFacts
    #: Whether it must run a speculator.
    speculates: bool = False


class Executor(ABC):
    """Runs steps in order, never two calls at a time."""

    #: It runs what the config's `shadow` asks for, and reports it in StepResult.shadow.
    shadows: bool = False
    #: It runs the config's `logits_processors`.
    processes: bool = False

    @classmethod
    @abstractmethod
    def refusals(cls, need: ExecutorNeed, options: Any) -> Sequence[str]: ...

    @classmethod
    def shards(cls, need: ExecutorNeed, options: Any) -> int:
        """Over how many ranks it splits each layer. Decided before the model is described, so that head counts, cache
        groups and the memory plan are those of one rank."""
        return 1

    @classmethod
    @abstractmethod
    def create(
        cls,
        need: ExecutorNeed,
        options: Any,
        *,
        plan: Callable[[], bytes],
        restore: Callable[[], Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Load the model and allocate the cache.

        `plan()` gives the assembly plan's bytes, from which `pegboard.assembly.restore` makes the same parts in
        another process (ConfigError when they can't leave this one). `restore()` gives them in this process.
        A rank takes its own device, the plan's is that of rank 0. `progress` is called with (bytes done, bytes in all)
        while weights load."""

    @property
    @abstractmethod
    def flying(self) -> int:
        """Steps launched and not retired."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """Start a step; returns without waiting for the device. If it raises, the step will never retire and the
        steps before it still will. EngineDead: no step will ever run again."""

    @abstractmethod
    def retire(self, depth: int) -> StepResult | None:
        """The result of the oldest step if more than `depth` fly, waiting for it; else None. If it raises, that step
        is gone."""

    @abstractmethod
    def memory(self) -> MemoryReport: ...

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """As of the model."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Give all memory back. Legal at any time, more than once."""
