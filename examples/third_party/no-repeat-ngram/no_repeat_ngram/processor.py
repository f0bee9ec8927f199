"""The ban on runs of tokens that came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from pegboard.contracts.processor import LogitsProcessor, ProcessorNeed, ProcessorOpening, ProcessRows


class Arguments(BaseModel):
    """What a request may say under `processors["no-repeat-ngram"]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Tokens of a run that may come once.
    size: int = Field(default=3, ge=1)
    #: What stands in the prompt counts, too.
    prompt: bool = True


class _Text:
    """The tokens of one text, and what followed each run of size - 1 of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], list[int]] = {}

    def append(self, token: int) -> None:
        if len(self.tokens) >= self.size - 1:
            self.followers.setdefault(self.end(), []).append(token)
        self.tokens.append(token)

    def end(self, drafts: Sequence[int] = ()) -> tuple[int, ...]:
        """The last size - 1 tokens, if `drafts` come next."""
        known = [*self.tokens[-self.size :], *drafts]
        return tuple(known[len(known) - self.size + 1 :])

    def banned(self, drafts: Sequence[int]) -> list[int]:
        """After the text and these drafts, which may hold runs themselves."""
        if len(self.tokens) + len(drafts) < self.size - 1:
            return []
        found = list(self.followers.get(self.end(drafts), ()))
        text = [*self.tokens[-self.size :], *drafts]
        last, first = self.end(drafts), max(0, len(text) - len(drafts) - self.size + 1)
        found += [
            text[start + self.size - 1]
            for start in range(first, len(text) - self.size + 1)
            if tuple(text[start : start + self.size - 1]) == last
        ]
        return sorted(set(found))


class NoRepeatNgram(LogitsProcessor):
    arguments = Arguments
    needs_host_token = True
    takes_drafts = True

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    @classmethod
    def refusals(cls, need: ProcessorNeed, options: Any) -> Sequence[str]:
        return []

    @classmethod
    def create(cls, need: ProcessorNeed, options: Any) -> Self:
        return cls()

    def open(self, opening: ProcessorOpening) -> None:
        arguments = opening.arguments
        assert isinstance(arguments, Arguments)
        text = self._texts[opening.slot] = _Text(arguments.size)
        for token in (*(opening.prompt if arguments.prompt else ()), *opening.output):
            text.append(token)

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._texts[slot].append(token)

    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        places: list[tuple[int, int]] = []
        row = 0
        for place, slot in enumerate(rows.slots):
            drafts = rows.drafts_of(place)
            for count in range(len(drafts) + 1):
                places += [(row, token) for token in self._texts[slot].banned(drafts[:count])]
                row += 1
        if places:
            index = torch.tensor(places, dtype=torch.int64)
            if logits.is_cuda:  # from pinned memory, so that nobody waits
                index = index.pin_memory().to(logits.device, non_blocking=True)
            logits.index_put_((index[:, 0], index[:, 1]), logits.new_full((), -torch.inf))
