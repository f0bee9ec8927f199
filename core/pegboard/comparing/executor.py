"""The local executor with a probe in it, offered to one engine as a plugin object."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pegboard.contracts.part import Part
from pegboard.contracts.quantizer import Quantizer
from pegboard.contracts.scheduler import StepPlan
from pegboard.registry.hookspecs import hookimpl
from pegboard.runner.local import LocalExecutor
from pegboard.runner.model_runner import ModelRunner
from pegboard.runner.tickets import Ticket

from .probe import Probe, ProbedAttention, ProbedModel, ProbedOps, ProbedQuantizer, ProbedSampler

if TYPE_CHECKING:
    from pegboard.needs import Needs
    from pegboard.selection import Selection
    from pegboard.survey import Survey

NAME = "local-probed"


class _ProbedRunner:
    """Steps run by the parts as they are, so that speed is theirs, but while the probe is active."""

    def __init__(self, plain: ModelRunner, probe: Probe) -> None:
        parts, layers = plain.parts, {id(cache): layer for layer, cache in enumerate(plain.caches)}
        self._plain, self._probe = plain, probe
        self._probed = plain.with_parts(
            parts.replace(
                model=ProbedModel(parts.model, probe),
                ops=ProbedOps(parts.ops, probe, layers),
                prefill=ProbedAttention(parts.prefill, probe, layers),
                decode=ProbedAttention(parts.decode, probe, layers),
                sampler=ProbedSampler(parts.sampler, probe),
            )
        )

    def launch(self, plan: StepPlan) -> Ticket:
        return (self._probed if self._probe.active else self._plain).launch(plan)

    @property
    def cache_bytes(self) -> int:
        return self._plain.cache_bytes

    @property
    def workspace_bytes(self) -> int:
        return self._plain.workspace_bytes


class _ProbedExecutor(LocalExecutor):
    probe: ClassVar[Probe]

    @classmethod
    def _quantizer(cls, selection: Selection, needs: Needs) -> Quantizer:
        return ProbedQuantizer(super()._quantizer(selection, needs), cls.probe)

    @classmethod
    def _watched(cls, runner: ModelRunner, survey: Survey) -> _ProbedRunner:
        return _ProbedRunner(runner, cls.probe)


class ProbePlugin:
    """Offers an executor of one probe."""

    def __init__(self, probe: Probe) -> None:
        self._executor = type("ProbedExecutor", (_ProbedExecutor,), {"probe": probe})

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [Part(role="executor", name=NAME, factory=self._executor, summary="local, with a probe")]
