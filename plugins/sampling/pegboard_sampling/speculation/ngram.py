"""Prompt lookup (Saxena 2023): what followed the last tokens when they came before is likely to follow again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import DraftContext, Drafts, Speculator, SpeculatorNeed, SpeculatorSpec
from pegboard.devices import torch_device

from .history import TokenHistory
from .options import NGramOptions


class NGramSpeculator(Speculator):
    """Of all earlier places that end like the text, the one with the longest suffix in common (`max_n` tokens are
    compared), the latest of equals; none shorter than `min_n`. Its continuation is proposed, and goes on with the
    proposal itself where it reaches the end of the text, as a copy that overlaps its own source does.

    On CUDA every place that a slot has is looked at, so that the work depends on no length; on a CPU those in use."""

    capturable = True

    def __init__(self, need: SpeculatorNeed, options: NGramOptions) -> None:
        self._options = options
        self._history = TokenHistory(need.slots, need.max_length, torch.device(torch_device(need.device)))

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: NGramOptions) -> Sequence[str]:
        return ()

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: NGramOptions) -> SpeculatorSpec:
        return SpeculatorSpec(drafts=options.drafts, weight_bytes=TokenHistory.bytes_for(need.slots, need.max_length))

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need, options)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._history.open(openings)

    def propose(self, context: DraftContext) -> Drafts:
        length = self._history.lengths[context.slots][:, None]
        reach = self._history.tokens.shape[1] - 1
        if length.device.type == "cpu":
            reach = max(int(length.max()), 1)
        tokens = self._history.tokens[context.slots, :reach]
        place = torch.arange(reach, device=tokens.device)
        common = torch.zeros_like(tokens)
        alive = (place < length - 1).expand_as(tokens)
        for back in range(self._options.max_n):
            wanted = tokens.gather(1, (length - 1 - back).clamp(min=0))
            shifted = tokens if not back else torch.nn.functional.pad(tokens, (back, 0))[:, :reach]
            alive = alive & (shifted == wanted) & (place >= back) & (length > back)
            common += alive
        best, end = (common.long() * reach + place).max(1, keepdim=True)
        found = best // reach >= self._options.min_n
        step = torch.arange(context.drafts, device=tokens.device)
        source = end + 1 + step % (length - 1 - end).clamp(min=1)
        drafts = tokens.gather(1, source.clamp_(max=reach - 1)).long()
        return Drafts(ids=drafts.masked_fill_(~found, -1))

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        self._history.append(slots, ids, count)
