"""A layer that continues the target's own hidden states, one token after another (EAGLE-1, Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Self

import torch
from torch import Tensor

from pegboard import PegboardError
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
from .eagle_cache import EntryCache
from .eagle_layer import EagleLayer, EagleShape
from .eagle_training import EagleTrainer
from .head_files import HeadFiles
from .history import TokenHistory
from .last_states import LastStates
from .options import EagleOptions

#: Entries of a prompt that run at a time.
_CHUNK = 256
#: Bytes of a number in the cache on CUDA, where models are of 16 bits, for the memory plan.
_CACHE_WIDTH = 2


class EagleSpeculator(Speculator):
    """Entry i of a slot is made of the target's state after token i and of token i + 1, and gives the state after that;
    the target's head makes a draft of it, and draft and state are the next entry. Entries of drafts are overwritten by
    those of what was kept.

    The cache has room for the longest text in every slot."""

    capturable = True

    def __init__(self, need: SpeculatorNeed, options: EagleOptions) -> None:
        self._need, self._path = need, resolve_model(options.model)
        self._device = torch.device(torch_device(need.device))
        self._drafts, self._entries = options.drafts, _entries(need, options)
        self._candidates = options.candidates
        self._history = TokenHistory(need.slots, need.max_length, self._device)

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: EagleOptions) -> Sequence[str]:
        try:
            _read(need, options)
        except PegboardError as error:
            return [f"its layer {options.model} can't be used: {error}"]
        return []

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: EagleOptions) -> SpeculatorSpec:
        shape = _read(need, options)
        cache = 0  # on a CPU, memory that no slot has used yet is not taken
        if need.device.type == "cuda":
            cache = shape.cache_bytes(need.slots, _entries(need, options), _CACHE_WIDTH)
        history = TokenHistory.bytes_for(need.slots, need.max_length)
        return SpeculatorSpec(drafts=options.drafts, hidden="all", weight_bytes=shape.nbytes + cache + history)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need, options)

    @classmethod
    def trainer(cls, training: HeadTraining) -> HeadTrainer:
        return EagleTrainer(training)

    def attach(self, target: DraftTarget) -> None:
        need = self._need
        with HeadFiles(self._path) as files:
            shape = EagleShape.read(files, need.target)
            layer = EagleLayer.load(files, shape, target.dtype, self._device, self._entries)
        self._target = target
        self._draws = make_draws(need, need.device, target.dtype, self._candidates)
        self._layer = layer
        self._cache = make_cache(layer, need.slots, self._entries, target.dtype, self._device)
        #: The expected state after each slot's last token.
        self._last = LastStates(need.slots, shape.config.hidden_size, target.dtype, self._device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._history.open(openings)
        self._draws.open(openings)
        self._last.open(openings)
        self._cache.open(openings)

    def observe_prompt(self, slot: int, start: int, hidden: Tensor) -> None:
        slots = torch.full((1,), slot, device=self._device)
        self._cache.begin(slot, start)
        for first in range(0, hidden.shape[0], _CHUNK):
            piece = hidden[None, first : first + _CHUNK]
            at, width = start + first, piece.shape[1]
            ids = self._history.tokens[slot, at + 1 : at + 1 + width].long()
            places = torch.full((1,), at, device=self._device)
            self._forward(slots, places, ids[None], piece, torch.full_like(places, width))

    def propose(self, context: DraftContext) -> Drafts:
        slots = context.slots
        state, one = self._last.of(slots), torch.ones_like(slots)
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        for draft in range(min(context.drafts, self._drafts)):
            place = context.positions + draft
            if draft:
                state = self._forward(slots, place - 1, ids[-1][:, None], state[:, None], one)[:, 0]
            chosen, distribution = self._draws.choose(self._target.head(state), slots, place + 1)
            ids.append(chosen)
            probs += [] if distribution is None else [distribution]
        found = self._last.without_unknown(slots, torch.stack(ids, 1))
        return Drafts(ids=found, probs=torch.stack(probs, 1) if probs else None)

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        self._history.append(slots, ids, count)

    def observe_hidden(self, slots: Tensor, ids: Tensor, count: Tensor, hidden: Tensor) -> None:
        starts = (self._history.lengths[slots] - count - 1).clamp_(min=0)
        states = self._forward(slots, starts, ids.clamp(min=0), hidden, count)
        self._last.keep(slots, states, count)

    def _forward(self, slots: Tensor, starts: Tensor, ids: Tensor, hidden: Tensor, count: Tensor) -> Tensor:
        """States [R, w, E] after ids [R, w], chosen from hidden [R, w, E], whose entries begin at starts [R]; from
        `count` [R] on they are written nowhere and give anything."""
        embedding, flat = self._layer.embedding, ids.flatten()
        embedded = self._target.embed(flat) if embedding is None else embedding[flat]
        attend = partial(self._cache.attend, slots=slots, starts=starts, count=count)
        return self._layer.forward(embedded.view(hidden.shape), hidden, attend)


def make_cache(layer: EagleLayer, slots: int, entries: int, dtype: torch.dtype, device: torch.device) -> EntryCache:
    if device.type == "cuda" and find_spec("triton") is not None:
        from .eagle_fused import FusedEntryCache

        if FusedEntryCache.takes(dtype, device):
            return FusedEntryCache(layer, slots, entries, dtype, device)
    return EntryCache(layer, slots, entries, dtype, device)


def _entries(need: SpeculatorNeed, options: EagleOptions) -> int:
    """Of a slot: the longest text, drafts behind it, and one for what belongs nowhere."""
    return need.max_length + options.drafts + 1


def _read(need: SpeculatorNeed, options: EagleOptions) -> EagleShape:
    with HeadFiles(resolve_model(options.model)) as files:
        return EagleShape.read(files, need.target)
