"""Observers: told of lifecycle events, never on the per-layer path.

An observer implements any of the hooks in `pegboard.registry.hookspecs.ObserverSpec`, each marked `@hookimpl`, with any
subset of its arguments. Hooks run on the step's thread, so they must be quick; one that raises is logged and dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from .scheduler import DraftReport, FinishReason
from .shadow import ShadowCheck


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    #: Submission to first row in a step.
    queue_time: float | None = None
    #: Submission to first token.
    ttft: float | None = None
    #: Mean time between tokens after the first.
    itl: float | None = None
    total_time: float | None = None
    preemptions: int = 0


class EngineReady(msgspec.Struct, frozen=True, kw_only=True):
    #: Role -> the part chosen.
    parts: Mapping[str, str]
    load_seconds: float
    #: Tensors in the checkpoint that the model has no use for.
    unused_tensors: tuple[str, ...] = ()


class RequestAdmitted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    prompt_tokens: int


class RequestFinished(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of a request has ended."""

    id: str
    index: int
    finish_reason: FinishReason
    metrics: RequestMetrics
    error: str | None = None


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the host, in one turn of the engine: the step that it planned and launched is not the one that it
    retired when steps run ahead."""

    #: Telling observers of new requests, ending dropped ones, planning.
    schedule: float
    #: In the executor, the model included: on a CPU all of its work, elsewhere no more than giving it to the device.
    launch: float
    #: Waiting for the device, and reading the result.
    retire: float
    commit: float
    #: Text, stop strings, delivery.
    emit: float
    #: See StepResult.host_seconds; a part of `launch` and `retire`.
    executor: float | None = None

    @property
    def host(self) -> float | None:
        """What the host does beside the model; None when the executor does not tell its part."""
        return None if self.executor is None else self.schedule + self.executor + self.commit + self.emit


class StepDone(msgspec.Struct, frozen=True, kw_only=True):
    #: The step that retired.
    step: int
    rows: int
    #: From planning the next step to delivering this one's tokens; the device's time is in it when nothing runs ahead.
    seconds: float
    waiting: int
    running: int
    #: Where the seconds went.
    times: StepTimes
    #: See StepResult.shadow.
    shadow: tuple[ShadowCheck, ...] = ()
    #: See StepResult.drafts.
    drafts: DraftReport | None = None


class Observer(ABC):
    @classmethod
    @abstractmethod
    def refusals(cls, need: None, options: Any) -> Sequence[str]: ...

    @classmethod
    @abstractmethod
    def create(cls, need: None, options: Any) -> Self: ...
