"""What bounds rows whose choice may be among many tokens, from what the pass over the logits left of their chunks:
a logit that no candidate lies below, and how much can lie ahead of one.

Chunks of top-p alone have profiles: of some logits, what the chunk's tokens weigh that reach them. What reaches any
other logit weighs no less than what reaches the next one up, and no more than what reaches the next one down."""

from __future__ import annotations

import triton
import triton.language as tl

from . import best, chunks
from . import values as v
from .chunks import COLUMNS

#: Halvings of the range of logits that matters.
_HALVINGS = tl.constexpr(8)
_LEAST_FINITE = tl.constexpr(-3.4028234663852886e38)
#: Profiles are sums of float32, so they decide with a margin: whoever must be sure weighs exactly.
_MARGIN = tl.constexpr(1.0001)


@triton.jit
def _kth_maximum(maxima, groups, count, GROUPS: tl.constexpr):
    """What `count` or some more of a row's group maxima reach; -inf where there are fewer groups."""
    group = tl.arange(0, GROUPS)
    top = tl.load(maxima + group, mask=group < groups, other=float("-inf"))
    keys = tl.where(group < groups, (v.ordered(top).to(tl.int64) << 32) | group.to(tl.int64), v.LOWEST)
    found = tl.full([], float("-inf"), tl.float32)
    if count <= groups:
        found = v.value_of(best.bound(keys, groups, count, count + (count >> 2)))
    return found


@triton.jit
def _least_score(floats, slot, total, vocab):
    """Tokens below this together are too light to matter to top-p, or each of them to min-p."""
    top_p = v.number(floats, slot, v.TOP_P)
    least = tl.log(v.number(floats, slot, v.MIN_P).to(tl.float32))
    if top_p < 1:
        least = tl.maximum(least, tl.log(((1 - top_p) * (total / vocab).to(tl.float64)).to(tl.float32)))
    return least - 1e-3


@triton.jit
def _profiles(profiles, row, chunk_count, beside, CHUNKS: tl.constexpr):
    """[CHUNKS, COLUMNS] of a row: logits, and what the tokens that reach them weigh, the row's peak as 1."""
    chunk, column = tl.arange(0, CHUNKS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = profiles + (row * chunk_count + chunk) * 2 * COLUMNS + column
    limits = tl.load(at, mask=chunk < chunk_count, other=float("-inf"))
    masses = tl.load(at + COLUMNS, mask=chunk < chunk_count, other=0.0)
    # What outweighs nothing has no place beside the peak; a NaN row is nobody's, but must not be compared
    weighs = (beside > float("-inf"))[:, None] & (masses == masses)
    return limits, tl.where(weighs, masses * tl.exp(beside)[:, None], 0.0)


@triton.jit
def _reached_by(profiles, row, chunk_count, beside, temperature, wanted, bottom, top, CHUNKS: tl.constexpr):
    """A logit in bottom .. top so that what reaches it surely weighs `wanted`."""
    limits, masses = _profiles(profiles, row, chunk_count, beside, CHUNKS)
    for _ in range(_HALVINGS):
        middle = 0.5 * bottom + 0.5 * top
        sure = middle + chunks.slack(middle, temperature)
        least = tl.max(tl.where(limits >= sure, masses, 0.0), 1)
        enough = tl.sum(least, 0).to(tl.float64) >= wanted * _MARGIN
        bottom = tl.where(enough, middle, bottom)
        top = tl.where(enough, top, middle)
    return bottom


@triton.jit
def may_weigh(profiles, row, chunk_count, of_chunks, beside, sums, temperature, x, wanted, CHUNKS: tl.constexpr):
    """Whether what lies ahead of a token with the logit x may weigh `wanted`; False: it surely weighs less. `sums`
    [CHUNKS]: what each chunk weighs."""
    limits, masses = _profiles(profiles, row, chunk_count, beside, CHUNKS)
    sure = x - chunks.slack(x, temperature)
    most = tl.minimum(tl.min(tl.where(limits <= sure, masses, float("inf")), 1), sums)
    # Equal logits may be ahead: ids decide
    most = tl.where(of_chunks < x, 0.0, most)
    return tl.sum(most, 0).to(tl.float64) * _MARGIN >= wanted


@triton.jit(do_not_specialize=["groups", "chunk_count"])
def bound_candidates(
    slots,
    floats,
    integers,
    maxima,
    statistics,
    profiles,
    bounds,
    vocab,
    groups,
    chunk_count,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """bounds [N, 2] float32: a logit that takes part is not below the first, which is finite, +inf or in rows that
    choose in another way NaN; the second is the greatest. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) == v.WIDE:
        temperature = v.temperature_of(floats, integers, slot)
        _, peak, beside, total = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
        count, top_p = v.integer(integers, slot, v.TOP_K), v.number(floats, slot, v.TOP_P)
        if count > 0:
            floor = _kth_maximum(maxima + row * groups, groups, count.to(tl.int32), GROUPS)
        else:
            floor = peak + temperature * _least_score(floats, slot, total, vocab)
            if top_p < 1:
                wanted = top_p * total.to(tl.float64)
                floor = _reached_by(profiles, row, chunk_count, beside, temperature, wanted, floor, peak, CHUNKS)
        tl.store(bounds + row * 2, tl.maximum(floor, _LEAST_FINITE))
        tl.store(bounds + row * 2 + 1, peak)
    else:
        tl.store(bounds + row * 2, float("nan"))
