"""Heads on the target's last hidden state, one for each place ahead (Medusa-1, Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pegboard import CheckpointError, PegboardError
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import (
    DraftContext,
    Drafts,
    DraftTarget,
    HeadTrainer,
    HeadTraining,
    Speculator,
    SpeculatorNeed,
    SpeculatorSpec,
)
from pegboard.devices import torch_device
from pegboard.hub import resolve_model

from .drawing import make_draws
from .head_files import HeadFiles
from .last_states import LastStates
from .medusa_heads import MedusaFile, MedusaHeads
from .medusa_training import MedusaTrainer
from .options import MedusaOptions


class MedusaSpeculator(Speculator):
    """Head i gives the distribution of the token i + 2 places behind the state that it is given, whatever comes
    between. All heads run at once: blocks as one batched product, the target's head over all their states.

    Greedy requests get each head's first choice, others what the noise of that position chooses among its `candidates`
    most probable tokens."""

    capturable = True

    def __init__(self, need: SpeculatorNeed, options: MedusaOptions) -> None:
        self._path = resolve_model(options.model)
        self._drafts, _ = _read(need, options)
        self._device = torch.device(torch_device(need.device))
        self._need, self._candidates = need, options.candidates

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: MedusaOptions) -> Sequence[str]:
        try:
            _read(need, options)
        except PegboardError as error:
            return [f"its heads {options.model} can't be used: {error}"]
        return []

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: MedusaOptions) -> SpeculatorSpec:
        drafts, stored = _read(need, options)
        return SpeculatorSpec(drafts=drafts, hidden="kept", weight_bytes=stored)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need, options)

    @classmethod
    def trainer(cls, training: HeadTraining) -> HeadTrainer:
        return MedusaTrainer(training)

    def attach(self, target: DraftTarget) -> None:
        need = self._need
        self._target = target
        self._draws = make_draws(need, need.device, target.dtype, self._candidates)
        self._heads = MedusaHeads.load(self._path, need.target, self._drafts, target.dtype, self._device)
        #: What each slot's last token was chosen from.
        self._last = LastStates(need.slots, need.target.hidden_size, target.dtype, self._device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._draws.open(openings)
        self._last.open(openings)

    def propose(self, context: DraftContext) -> Drafts:
        slots, count = context.slots, min(context.drafts, self._drafts)
        rows = slots.shape[0]
        states = self._heads.states(self._last.of(slots), count)
        if self._heads.outputs is None:
            logits = self._target.head(states.flatten(0, 1))
        else:
            logits = torch.bmm(states, self._heads.outputs[:count].mT).flatten(0, 1)
        ahead = torch.arange(1, count + 1, device=slots.device)
        positions = (context.positions + ahead[:, None]).flatten()
        ids, probs = self._draws.choose(logits, slots.repeat(count), positions)
        found = self._last.without_unknown(slots, ids.view(count, rows).t())
        return Drafts(ids=found, probs=None if probs is None else probs.view(count, rows, -1).transpose(0, 1))

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        """All that it must know comes with the states."""

    def observe_hidden(self, slots: Tensor, ids: Tensor, count: Tensor, hidden: Tensor) -> None:
        self._last.keep(slots, hidden, count)


def _read(need: SpeculatorNeed, options: MedusaOptions) -> tuple[int, int]:
    """Drafts a row at most, and the bytes of the heads that give them. CheckpointError: the file does not fit."""
    path = resolve_model(options.model)
    with HeadFiles(path) as files:
        found = MedusaFile.read(files, need.target)
    drafts = options.drafts or found.heads
    if drafts > found.heads:
        raise CheckpointError(f"{path} has {found.heads} heads, drafts = {drafts} needs one each")
    return drafts, found.nbytes(drafts)
