"""What `train-heads` is asked for, and what it reports."""

from __future__ import annotations

import math

import msgspec

from ..counts import count_problems
from ..errors import ConfigError


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """On the held-out prompts, greedy, every draft asked for."""

    #: Share of rows with a first, second, ... draft in which it was right.
    by_place: tuple[float, ...]
    #: Tokens that a row keeps in a step.
    mean_length: float


class HeadsReport(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    parameters: int
    #: Tokens with their states that were learnt from, and steps of the optimiser.
    tokens_learnt: int
    steps: int
    #: Mean over the first and the last tenth of the steps.
    first_loss: float
    last_loss: float
    held_out_prompts: int
    before: Acceptance
    after: Acceptance
    bytes_written: int


class HeadsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`texts` continuations of up to `tokens` tokens are collected, or so many pieces of `length` tokens of a text file
    at most. ConfigError: numbers that are no such numbers."""

    drafts: int = 3
    texts: int = 256
    tokens: int = 96
    length: int = 256
    epochs: int = 8
    batch: int = 8
    rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("drafts", "texts", "tokens", "length", "epochs", "batch")
        wrong = count_problems(self, dict.fromkeys(counts, 1))
        if not isinstance(self.rate, int | float) or not 0 <= self.rate < math.inf:
            wrong.append(f"rate is {self.rate!r}, must be a number from 0 on")
        if wrong:
            raise ConfigError("the settings of the training are not valid", wrong)
