"""A penalty for what was chosen a moment ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self

import torch
from pegboard import InvalidRequest, SamplingParams
from pegboard.contracts.processor import LogitsProcessor, ProcessorNeed, ProcessorOpening, ProcessRows
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from .options import Options


class Arguments(BaseModel):
    """What a request may say under `processors["my-part"]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: What the logit of a recent token loses.
    strength: float = Field(default=1.0, gt=0)
    #: The last tokens of the output that count as recent.
    window: int = Field(default=32, ge=1)


class Text:
    """One request's strength, and the end of its output."""

    def __init__(self, arguments: Arguments, output: Sequence[int]) -> None:
        self.strength = arguments.strength
        self.recent: deque[int] = deque(output, maxlen=arguments.window)

    def after(self, drafts: Sequence[int]) -> set[int]:
        """Recent tokens, if `drafts` were chosen next."""
        text = [*self.recent, *drafts]
        return set(text[-(self.recent.maxlen or 0) :])


class MyPart(LogitsProcessor):
    arguments = Arguments
    needs_host_token = True  # what it does depends on the last token
    takes_drafts = True  # `process` serves rows of drafts

    def __init__(self, options: Options) -> None:
        self._most = options.most
        self._texts: dict[int, Text] = {}

    @classmethod
    def refusals(cls, need: ProcessorNeed, options: Options) -> Sequence[str]:
        return ()  # any device, any model

    @classmethod
    def create(cls, need: ProcessorNeed, options: Options) -> Self:
        return cls(options)

    def check(self, arguments: Arguments, sampling: SamplingParams) -> None:
        if arguments.strength > self._most:
            raise InvalidRequest(f"strength is {arguments.strength}; this engine allows at most {self._most}")

    def open(self, opening: ProcessorOpening) -> None:
        assert isinstance(opening.arguments, Arguments)
        self._texts[opening.slot] = Text(opening.arguments, opening.output)

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        self._texts[slot].recent.extend(tokens)

    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        places: list[tuple[int, int]] = []
        losses: list[float] = []
        row = 0
        for place, slot in enumerate(rows.slots):
            text, drafts = self._texts[slot], rows.drafts_of(place)
            for count in range(len(drafts) + 1):  # a row of logits after each draft, too
                found = sorted(text.after(drafts[:count]))
                places += [(row, token) for token in found]
                losses += [-text.strength] * len(found)
                row += 1
        if places:
            index, loss = self._upload(torch.tensor(places).T, logits), self._upload(torch.tensor(losses), logits)
            logits.index_put_((index[0], index[1]), loss.to(logits.dtype), accumulate=True)

    def _upload(self, numbers: Tensor, logits: Tensor) -> Tensor:
        """To the device of the logits; from pinned memory, so that nobody waits."""
        return numbers.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else numbers
