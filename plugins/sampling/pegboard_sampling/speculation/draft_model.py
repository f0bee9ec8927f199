"""A small model drafts for a large one (Leviathan et al. 2023), with the same noise as its target."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pegboard import PegboardError
from pegboard.contracts.model import ModelSpec
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import DraftContext, Drafts, Speculator, SpeculatorNeed, SpeculatorSpec
from pegboard.devices import torch_device
from pegboard.plan import AssemblyPlan
from pegboard.registry.registry import Registry
from pegboard.runner.companion import companion_cache_bytes
from pegboard.survey import Survey

from .draft_passes import DraftPasses, plan_draft
from .options import DraftModelOptions
from .pipelining import Pipeline


class DraftModelSpeculator(Speculator):
    """Runs the draft model once a draft, one token after another; its choices have the noise of their positions, so
    that they are the target's own as often as the two models agree.

    Beside the target on CUDA its passes are part of the recorded step; on another device they go on while the target
    verifies (`Pipeline`)."""

    def __init__(self, need: SpeculatorNeed, options: DraftModelOptions) -> None:
        self._passes = DraftPasses(need, options)
        home = torch.device(torch_device(need.device))
        self._pipeline: Pipeline | None = None
        if self._passes.device != home:
            self._pipeline = Pipeline(self._passes, home, need.slots, ahead=not need.wants_probs)
        self.capturable = self._passes.capturable and self._pipeline is None

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: DraftModelOptions) -> Sequence[str]:
        if need.device.type == "cuda" and options.device == "cpu":
            return [
                "a draft model on the CPU would keep the target on the GPU waiting: leave `device` out, or a CUDA one"
            ]
        try:
            plan, registry = plan_draft(need, options)
        except PegboardError as error:
            found = getattr(error, "reasons", ()) or (str(error),)
            return [f"its draft model {options.model} can't run: {reason}" for reason in found]
        spec = _spec(plan, registry)
        if spec.vocab_size == need.target.vocab_size:
            return []
        sizes = f"a vocabulary of {spec.vocab_size} tokens, the target one of {need.target.vocab_size}"
        return [f"its draft model has {sizes}: both must have the same tokenizer"]

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: DraftModelOptions) -> SpeculatorSpec:
        plan, _ = plan_draft(need, options)
        beside = (plan.device.type, plan.device.index) == (need.device.type, need.device.index)
        cache = companion_cache_bytes(plan) if plan.device.type == "cuda" else 0
        return SpeculatorSpec(drafts=options.drafts, weight_bytes=plan.memory.weights + cache if beside else 0)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need, options)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        with contextlib.nullcontext() if self._pipeline is None else self._pipeline.current():
            self._passes.open(openings)

    def propose(self, context: DraftContext) -> Drafts:
        if self._pipeline is not None:
            return self._pipeline.propose(context.slots, context.drafts)
        probs = self._passes.draft(context.slots, context.drafts)
        return Drafts(ids=self._passes.standing_ids(context.slots, context.drafts), probs=probs)

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        if self._pipeline is None:
            self._passes.observe(slots, ids, count)
        else:
            self._pipeline.observe(slots, ids)


def _spec(plan: AssemblyPlan, registry: Registry) -> ModelSpec:
    survey = Survey.of_plan(plan, registry)
    survey.checkpoint.close()
    return survey.spec
