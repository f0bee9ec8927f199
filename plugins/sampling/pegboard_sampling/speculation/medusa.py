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

from .choice_tree import ChoiceTree
from .drawing import TorchDraws, make_draws
from .head_files import HeadFiles
from .last_states import LastStates
from .medusa_heads import MedusaFile, MedusaHeads
from .medusa_training import MedusaTrainer
from .options import MedusaOptions


class MedusaSpeculator(Speculator):
    """Head i gives the distribution of the token i + 2 places behind the state that it is given, whatever comes
    between. All heads run at once: blocks as one batched product, the target's head over all their states.

    Greedy requests get each head's first choice, others what the noise of that position chooses among its `candidates`
    most probable tokens. A tree has several choices of a head, the best under that noise."""

    capturable = True

    def __init__(self, need: SpeculatorNeed, options: MedusaOptions) -> None:
        self._path = resolve_model(options.model)
        self._heads_used, _ = _read(need, options)
        self._device = torch.device(torch_device(need.device))
        self._need, self._candidates = need, options.candidates
        self._tree = None if options.choices is None else ChoiceTree(options.choices, self._device)

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: MedusaOptions) -> Sequence[str]:
        try:
            _read(need, options)
        except PegboardError as error:
            return [f"its heads {options.model} can't be used: {error}"]
        return []

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: MedusaOptions) -> SpeculatorSpec:
        heads, stored = _read(need, options)
        if options.choices is None:
            return SpeculatorSpec(drafts=heads, hidden="kept", weight_bytes=stored)
        return SpeculatorSpec(drafts=len(options.choices), depth=heads, hidden="kept", weight_bytes=stored)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need, options)

    @classmethod
    def trainer(cls, training: HeadTraining) -> HeadTrainer:
        return MedusaTrainer(training)

    def attach(self, target: DraftTarget) -> None:
        need = self._need
        self._target = target
        self._ranks = None if self._tree is None else TorchDraws(need.slots, self._candidates, False, self._device)
        self._draws = self._ranks or make_draws(need, need.device, target.dtype, self._candidates)
        self._heads = MedusaHeads.load(self._path, need.target, self._heads_used, target.dtype, self._device)
        #: What each slot's last token was chosen from.
        self._last = LastStates(need.slots, need.target.hidden_size, target.dtype, self._device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._draws.open(openings)
        self._last.open(openings)

    def propose(self, context: DraftContext) -> Drafts:
        slots, rows = context.slots, context.slots.shape[0]
        if self._tree is not None and self._ranks is not None:
            drafts = min(context.drafts, len(self._tree))
            heads, choices = self._tree.asks(drafts)
            logits, positions = self._asked(context, heads)
            best = self._ranks.best(logits, slots.repeat(heads), positions, choices).view(heads, rows, choices)
            found = self._last.without_unknown(slots, self._tree.ids(best, drafts))
            return Drafts(ids=found, parents=self._tree.parents[:drafts].expand_as(found))
        count = min(context.drafts, self._heads_used)
        logits, positions = self._asked(context, count)
        ids, probs = self._draws.choose(logits, slots.repeat(count), positions)
        found = self._last.without_unknown(slots, ids.view(count, rows).t())
        return Drafts(ids=found, probs=None if probs is None else probs.view(count, rows, -1).transpose(0, 1))

    def _asked(self, context: DraftContext, count: int) -> tuple[Tensor, Tensor]:
        """Logits [count * R, V] of the first heads, and the positions that they are of."""
        slots = context.slots
        states = self._heads.states(self._last.of(slots), count)
        if self._heads.outputs is None:
            logits = self._target.head(states.flatten(0, 1))
        else:
            logits = torch.bmm(states, self._heads.outputs[:count].mT).flatten(0, 1)
        ahead = torch.arange(1, count + 1, device=slots.device)
        return logits, (context.positions + ahead[:, None]).flatten()

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        """All that it must know comes with the states."""

    def observe_hidden(self, slots: Tensor, ids: Tensor, count: Tensor, hidden: Tensor) -> None:
        self._last.keep(slots, hidden, count)


def _read(need: SpeculatorNeed, options: MedusaOptions) -> tuple[int, int]:
    """How many heads are asked, and their bytes. CheckpointError: the file does not fit."""
    path = resolve_model(options.model)
    with HeadFiles(path) as files:
        found = MedusaFile.read(files, need.target)
    if options.choices is not None:
        drafts = max(len(path) for path in options.choices)
        if drafts > found.heads:
            raise CheckpointError(f"{path} has {found.heads} heads, choices has a path of {drafts}")
        return drafts, found.nbytes(drafts)
    drafts = options.drafts or found.heads
    if drafts > found.heads:
        raise CheckpointError(f"{path} has {found.heads} heads, drafts = {drafts} needs one each")
    return drafts, found.nbytes(drafts)
