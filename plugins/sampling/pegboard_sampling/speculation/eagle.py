"""A layer that continues the target's own hidden states, one token after another (EAGLE-1, Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
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
from .eagle_layer import EagleLayer, EagleShape, attend_where
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

    The cache has room for the longest text in every slot. A prompt's prefix that the target did not run, because it
    was cached, has no entries: `base` is the first that a slot has.

    On CUDA every entry that a slot may have is looked at, so that the work depends on no length; on a CPU those in
    use."""

    capturable = True

    def __init__(self, need: SpeculatorNeed, options: EagleOptions) -> None:
        self._need, self._path = need, resolve_model(options.model)
        self._device = torch.device(torch_device(need.device))
        self._drafts, self._entries = options.drafts, _entries(need, options)
        self._candidates = options.candidates
        self._history = TokenHistory(need.slots, need.max_length, self._device)
        self._base = torch.zeros(need.slots, dtype=torch.int64, device=self._device)
        #: Slots that have no entry yet.
        self._fresh = torch.ones(need.slots, dtype=torch.bool, device=self._device)

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
            self._layer = EagleLayer.load(files, shape, target.dtype, self._device, self._entries)
        self._target = target
        self._draws = make_draws(need, need.device, target.dtype, self._candidates)
        config = shape.config
        #: [slots, entries, K, D]; the last entry is for what belongs nowhere.
        size = (need.slots, self._entries, config.kv_heads, config.head_size)
        self._keys = torch.zeros(size, dtype=target.dtype, device=self._device)
        self._values = torch.zeros_like(self._keys)
        #: The expected state after each slot's last token.
        self._last = LastStates(need.slots, config.hidden_size, target.dtype, self._device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._history.open(openings)
        self._draws.open(openings)
        self._last.open(openings)
        for opening in openings:
            self._fresh[opening.slot] = True

    def observe_prompt(self, slot: int, start: int, hidden: Tensor) -> None:
        slots = torch.full((1,), slot, device=self._device)
        for first in range(0, hidden.shape[0], _CHUNK):
            piece = hidden[None, first : first + _CHUNK]
            at, width = start + first, piece.shape[1]
            ids = self._history.tokens[slot, at + 1 : at + 1 + width].long()
            places = torch.full((1,), at, device=self._device)
            self._begin(slots, places, places >= 0)
            self._forward(slots, places, ids[None], piece, torch.full_like(places, width), at + width)

    def propose(self, context: DraftContext) -> Drafts:
        slots = context.slots
        reach = self._reach(context.positions, context.drafts)
        state, one = self._last.of(slots), torch.ones_like(slots)
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        for draft in range(min(context.drafts, self._drafts)):
            place = context.positions + draft
            if draft:
                state = self._forward(slots, place - 1, ids[-1][:, None], state[:, None], one, reach)[:, 0]
            chosen, distribution = self._draws.choose(self._target.head(state), slots, place + 1)
            ids.append(chosen)
            probs += [] if distribution is None else [distribution]
        found = self._last.without_unknown(slots, torch.stack(ids, 1))
        return Drafts(ids=found, probs=torch.stack(probs, 1) if probs else None)

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        self._history.append(slots, ids, count)

    def observe_hidden(self, slots: Tensor, ids: Tensor, count: Tensor, hidden: Tensor) -> None:
        starts = (self._history.lengths[slots] - count - 1).clamp_(min=0)
        kept = count > 0
        inside = torch.arange(ids.shape[1], device=ids.device) < count[:, None]
        self._begin(slots, starts, kept)
        hidden = torch.where(inside[..., None], hidden, 0)  # beyond it may be NaN
        states = self._forward(slots, starts, ids.clamp(min=0), hidden, count, self._reach(starts, ids.shape[1]))
        self._last.keep(slots, states, count)

    def _begin(self, slots: Tensor, starts: Tensor, kept: Tensor) -> None:
        """A slot's first entry is the first that it is told."""
        fresh = self._fresh[slots]
        self._base.index_copy_(0, slots, torch.where(fresh & kept, starts, self._base[slots]))
        self._fresh.index_copy_(0, slots, fresh & ~kept)

    def _reach(self, starts: Tensor, width: int) -> int:
        """Entries that must be looked at."""
        if self._device.type != "cpu":
            return self._entries
        return min(int(starts.max()) + width, self._entries)

    def _forward(self, slots: Tensor, starts: Tensor, ids: Tensor, hidden: Tensor, count: Tensor, reach: int) -> Tensor:
        """States [R, w, E] after ids [R, w], chosen from hidden [R, w, E], whose entries begin at starts [R]; from
        `count` [R] on they are written nowhere and give anything."""
        step = torch.arange(ids.shape[1], device=ids.device)
        places = starts[:, None] + step
        inside = step < count[:, None]
        first = self._base[slots]
        entries = torch.where(inside, places, self._entries - 1).clamp_(max=self._entries - 1)
        seen = torch.arange(reach, device=ids.device)
        visible = (seen <= places[..., None]) & (seen >= first[:, None, None])
        visible = visible | (seen == places[..., None])  # nobody sees nothing: its row would be NaN

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            index = (slots[:, None].expand_as(entries), entries)
            self._keys.index_put_(index, k)
            self._values.index_put_(index, v)
            return attend_where(q, self._keys[slots, :reach], self._values[slots, :reach], visible)

        embedding = self._layer.embedding
        flat = ids.flatten()
        embedded = self._target.embed(flat) if embedding is None else embedding[flat]
        limit = self._entries - 1
        return self._layer.forward(embedded.view(hidden.shape), hidden, places.clamp(max=limit), attend)


def _entries(need: SpeculatorNeed, options: EagleOptions) -> int:
    """Of a slot: the longest text, drafts behind it, and one for what belongs nowhere."""
    return need.max_length + options.drafts + 1


def _read(need: SpeculatorNeed, options: EagleOptions) -> EagleShape:
    with HeadFiles(resolve_model(options.model)) as files:
        return EagleShape.read(files, need.target)
