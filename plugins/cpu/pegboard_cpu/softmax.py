"""Rows of scores on their way through a softmax that runs over blocks of entries (Milakov and Gimelshein 2018)."""

from __future__ import annotations

from typing import Any

import numpy

from .functions import exp
from .vectors import FAST, get, inner, put


@inner(fastmath=FAST)
def greatest(scores: int, count: int, softcap: Any, peak: Any) -> Any:
    """Caps the scores; the greatest of them and `peak`."""
    one, two = numpy.float32(1), numpy.float32(2)
    if softcap > 0:
        for e in range(count):
            put(scores, e, softcap * (one - two / (exp(two * get(scores, e) / softcap) + one)))  # tanh
    for e in range(count):
        score = get(scores, e)
        peak = score if score > peak else peak
    return peak


@inner(fastmath=FAST)
def exponentials(scores: int, count: int, peak: Any) -> Any:
    """exp(scores - peak) in place; their sum."""
    total = numpy.float32(0)
    for e in range(count):
        value = exp(get(scores, e) - peak)
        put(scores, e, value)
        total += value
    return total


@inner()
def scale(x: int, size: int, factor: Any, out: int) -> None:
    for i in range(size):
        put(out, i, get(x, i) * factor)


@inner()
def last_factor(peak: Any, total: Any, sinks: int, head: int) -> Any:
    """What the weighted sum is multiplied with in the end: 1 / sum, the head's sink (`sinks` 0: none) included."""
    if sinks == 0:
        return numpy.float32(1) / total
    sink = get(sinks, head)
    greater = sink if sink > peak else peak
    factor = exp(peak - greater)
    return factor / (total * factor + exp(sink - greater))
