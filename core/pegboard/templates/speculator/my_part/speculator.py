"""Drafts from a table: after a token comes what came after it the last time.

Letters: S slots, R rows, k drafts, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import torch
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import DraftContext, Drafts, Speculator, SpeculatorNeed, SpeculatorSpec
from torch import Tensor

from .options import Options


class MyPart(Speculator):
    """The table is on the device, where tokens are chosen: nothing here waits for them, or asks for their number."""

    capturable = True

    def __init__(self, need: SpeculatorNeed) -> None:
        device = f"{need.device.type}:{need.device.index}" if need.device.type == "cuda" else need.device.type
        #: [S, V]: the token that followed each one last; -1: none did.
        self._next = torch.full((need.slots, need.target.vocab_size), -1, dtype=torch.int32, device=device)
        #: [S]: the last token of a slot's text.
        self._last = torch.zeros(need.slots, dtype=torch.int64, device=device)

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: Options) -> Sequence[str]:
        return ()  # any device, any model

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: Options) -> SpeculatorSpec:
        return SpeculatorSpec(drafts=options.drafts, weight_bytes=need.slots * (need.target.vocab_size * 4 + 8))

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Options) -> Self:
        return cls(need)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            text = [*opening.prompt, *opening.output]
            follows = dict(pairwise(text))  # the last of equal ones stays
            self._next[opening.slot] = -1
            if follows:
                tokens, after = self._upload(list(follows)), self._upload(list(follows.values()))
                self._next[opening.slot, tokens] = after.int()
            self._last[opening.slot : opening.slot + 1] = self._upload(text[-1:])

    def propose(self, context: DraftContext) -> Drafts:
        token, found = context.last_ids, []
        for _ in range(context.drafts):
            after = self._next[context.slots, token.clamp(min=0)].long()
            token = after.where(token >= 0, -1)  # nothing follows what is not known
            found.append(token)
        return Drafts(ids=torch.stack(found, 1))

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        last = self._last[slots]
        for place in range(ids.shape[1]):  # in the text's order: the last of equal ones stays
            kept = place < count
            token = ids[:, place].where(kept, last)
            self._next[slots, last] = token.int().where(kept, self._next[slots, last])
            last = token
        self._last[slots] = last

    def _upload(self, numbers: Sequence[int]) -> Tensor:
        """To the device; from pinned memory, so that nobody waits."""
        made = torch.tensor(numbers, dtype=torch.int64)
        device = self._last.device
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
