"""Perplexity: how surprised a model is by a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..contracts.sampler import SamplingParams

if TYPE_CHECKING:
    from ..engine import Engine


def perplexity(engine: Engine, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log probability of every token after the first of each text of ids."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in engine.generate([list(text) for text in texts], sampling):
        for record in output.raise_for_error().prompt_logprobs or ():
            total -= record.logprob
            count += 1
    return math.exp(total / count)
