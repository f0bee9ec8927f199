"""A small model drafts for a large one (Leviathan et al. 2023), with the same noise as its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pegboard import PegboardError
from pegboard.contracts.model import ModelSpec
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import DraftContext, Drafts, Speculator, SpeculatorNeed, SpeculatorSpec
from pegboard.devices import torch_device
from pegboard.dtypes import torch_dtype
from pegboard.plan import AssemblyPlan
from pegboard.registry.registry import Registry
from pegboard.runner.companion import SPARE, Companion, companion_cache_bytes, plan_companion
from pegboard.survey import Survey

from .drawing import make_draws
from .history import TokenHistory
from .options import DraftModelOptions

#: Tokens of a prompt that run at a time, and those that a row which fell behind catches up in a step on CUDA, where
#: nobody knows how many it lacks.
_CHUNK, _CATCH_UP = 256, 4


class DraftModelSpeculator(Speculator):
    """Runs the draft model once a draft, one token after another; its choices have the noise of their positions, so
    that they are the target's own as often as the two models agree.

    Prompts run through the draft model when their slot is opened. `valid` counts the entries of a slot's cache that
    belong to its text; a row that is behind (it had no drafts for a while) catches up first."""

    capturable = False

    def __init__(self, need: SpeculatorNeed, options: DraftModelOptions) -> None:
        plan, registry = _plan(need, options)
        self._companion = Companion(plan, registry)
        self._home = torch.device(torch_device(need.device))
        self._device = torch.device(self._companion.device)
        self._on_cpu = self._device.type == "cpu"
        self._history = TokenHistory(need.slots, need.max_length, self._device)
        self._draws = make_draws(need, plan.device, torch_dtype(plan.dtype), options.candidates)
        self._valid = torch.zeros(need.slots, dtype=torch.int64, device=self._device)
        #: Entries behind the text that hold the last drafts.
        self._tail = torch.zeros(need.slots, dtype=torch.int64, device=self._device)

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: DraftModelOptions) -> Sequence[str]:
        if need.device.type == "cuda" and options.device == "cpu":
            return [
                "a draft model on the CPU would keep the target on the GPU waiting: leave `device` out, or a CUDA one"
            ]
        try:
            plan, registry = _plan(need, options)
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
        plan, _ = _plan(need, options)
        beside = (plan.device.type, plan.device.index) == (need.device.type, need.device.index)
        cache = companion_cache_bytes(plan) if plan.device.type == "cuda" else 0
        return SpeculatorSpec(drafts=options.drafts, weight_bytes=plan.memory.weights + cache if beside else 0)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need, options)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._history.open(openings)
        self._draws.open(openings)
        for opening in openings:
            slot = torch.full((1,), opening.slot, device=self._device)
            length = len(opening.prompt) + len(opening.output) - 1
            for start in range(0, length, _CHUNK):
                width = min(_CHUNK, length - start)
                ids = self._history.tokens[opening.slot, start : start + width].long()
                at = torch.full((1,), start, device=self._device)
                self._companion.forward(slot, at, ids[None], torch.full_like(at, width))
            self._valid[opening.slot] = length
            self._tail[opening.slot] = 0

    def propose(self, context: DraftContext) -> Drafts:
        slots = context.slots.to(self._device, non_blocking=True)
        length = self._history.lengths[slots]
        hidden, ready = self._catch_up(slots, length)
        ids: list[Tensor] = []
        probs: list[Tensor | None] = []
        for draft in range(context.drafts):
            if draft:
                at = length + draft - 1
                hidden = self._companion.forward(slots, at, ids[-1][:, None], torch.ones_like(at))[:, 0]
            chosen, distribution = self._draws.choose(self._companion.logits(hidden), slots, length + draft)
            ids.append(chosen)
            probs.append(distribution)
        self._tail.index_copy_(0, slots, ready * (context.drafts - 1))
        found = torch.stack(ids, 1).masked_fill_(~ready[:, None], -1).to(self._home, non_blocking=True)
        if any(part is None for part in probs):
            return Drafts(ids=found)
        stacked = torch.stack([part for part in probs if part is not None], 1)
        return Drafts(ids=found, probs=stacked.to(self._home, non_blocking=True))

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        slots, ids, count = (part.to(self._device, non_blocking=True) for part in (slots, ids, count))
        self._history.append(slots, ids, count)
        right = self._valid[slots] + (count - 1).clamp_(min=0).minimum(self._tail[slots])
        self._valid.index_copy_(0, slots, right)
        self._tail.index_fill_(0, slots, 0)

    def _catch_up(self, slots: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [R, E] after the last token, and which rows [R] have come so far."""
        while True:
            valid = self._valid[slots].minimum(length - 1).clamp_(min=0)
            missing = length - valid
            width = min(int(missing.max()), SPARE) if self._on_cpu else _CATCH_UP
            place = valid[:, None] + torch.arange(width, device=self._device)
            tokens = self._history.tokens
            ids = tokens[slots[:, None], place.clamp(max=tokens.shape[1] - 1)].long()
            hidden = self._companion.forward(slots, valid, ids, missing)
            self._valid.index_copy_(0, slots, valid + missing.clamp(max=width))
            ready = missing <= width
            if not self._on_cpu or bool(ready.all()):
                last = (missing - 1).clamp_(min=0, max=width - 1)
                return hidden[torch.arange(slots.shape[0], device=self._device), last], ready


def _plan(need: SpeculatorNeed, options: DraftModelOptions) -> tuple[AssemblyPlan, Registry]:
    """max_length beyond the draft's context is refused there."""
    return plan_companion(
        options.model,
        device=options.device or torch_device(need.device),
        dtype=options.dtype,
        slots=need.slots,
        max_length=need.max_length,
        max_query=_CHUNK,
    )


def _spec(plan: AssemblyPlan, registry: Registry) -> ModelSpec:
    survey = Survey.of_plan(plan, registry)
    survey.checkpoint.close()
    return survey.spec
