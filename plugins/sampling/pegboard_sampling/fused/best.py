"""The k <= 64 best tokens of a row from its groups' maxima.

They lie in the k groups whose maxima come first, ties by lower index; so only those are read again. Few of their tokens
reach the k-th maximum, and where more do, bisecting leaves some 128. Nothing is sorted: a token's place is the number
of those ahead of it."""

from __future__ import annotations

import triton
import triton.language as tl

from . import values as v

#: Tokens that are compared with each other.
AT_ONCE = tl.constexpr(128)
MOST = tl.constexpr(64)
#: Tokens that all others are compared with at a time.
BLOCK = tl.constexpr(32)
#: A row's int64 of scratch: tokens, then groups.
SCRATCH = tl.constexpr(AT_ONCE.value + MOST.value)


@triton.jit
def bound(keys, reached, least, most):
    """What at least `least`, at most `most`, of the keys reach: distinct ones, but for LOWEST, which counts as none.
    Of these there are `reached`, which is enough."""
    low = tl.min(tl.ravel(tl.where(keys == v.LOWEST, v.HIGHEST, keys)), 0)
    high = tl.max(tl.ravel(keys), 0) + 1
    while reached > most:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down
        above = tl.sum(tl.ravel((keys >= middle).to(tl.int32)), 0)
        enough = above >= least
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reached = tl.where(enough, above, reached)
    return low


@triton.jit
def best_tokens(
    logits,
    maxima,
    scratch,
    count,
    slot,
    row,
    floats,
    integers,
    words,
    biases,
    queries,
    places,
    vocab,
    groups,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
):
    """Leaves at most AT_ONCE keys in `scratch`, in no order, with the `count` <= vocab best among them, and returns
    how many. `logits`, `maxima` and `scratch` [SCRATCH] are the row's own; GROUPS >= 64 is a power of two."""
    group = tl.arange(0, GROUPS)
    top = tl.load(maxima + group, mask=group < groups, other=float("-inf"))
    packed = (v.ordered(top).to(tl.int64) << 32) | (GROUPS - 1 - group).to(tl.int64)
    packed = tl.where(group < groups, packed, v.LOWEST)
    least = bound(packed, groups, count, MOST)
    taken = (packed >= least) & (group < groups)
    tl.store(scratch + AT_ONCE + tl.cumsum(taken.to(tl.int32), 0) - 1, group.to(tl.int64), mask=taken)
    many = tl.sum(taken.to(tl.int32), 0)
    tl.debug_barrier()
    at = tl.arange(0, MOST)
    chosen = tl.load(scratch + AT_ONCE + at, mask=at < many, other=0).to(tl.int32)
    ids = chosen[:, None] * v.GROUP + tl.arange(0, v.GROUP)[None, :]
    real = (at < many)[:, None] & (ids < vocab)
    x = tl.load(logits + ids, mask=real, other=float("-inf")).to(tl.float32)
    x = v.adjusted(x, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES)
    # With fewer groups than tokens asked for, a maximum bounds nothing
    floor = tl.where(groups >= count, least >> 32, -(1 << 31)).to(tl.int32)
    found = (real & (v.ordered(x) >= floor)).to(tl.int32)
    reached = tl.sum(tl.sum(found, 1), 0)
    if reached > AT_ONCE:
        keys = tl.where(found > 0, v.key_of(x, ids), v.LOWEST)
        found = (keys >= bound(keys, reached, count, AT_ONCE)).to(tl.int32)
    of_groups = tl.sum(found, 1)
    place = (tl.cumsum(of_groups, 0) - of_groups)[:, None] + tl.cumsum(found, 1) - 1
    tl.store(scratch + place, v.key_of(x, ids), mask=found > 0)
    tl.debug_barrier()
    return tl.sum(of_groups, 0)


@triton.jit
def listed(scratch, many):
    """Keys [AT_ONCE] of the tokens that best_tokens left in scratch, LOWEST beyond."""
    token = tl.arange(0, AT_ONCE)
    return tl.load(scratch + token, mask=token < many, other=v.LOWEST)


@triton.jit
def places(scratch, many, keys, peak, temperature, BLOCK: tl.constexpr):
    """Of each of the keys [K]: how many of those in scratch come before it, and what these weigh. BLOCK a turn."""
    row = tl.arange(0, BLOCK)
    # Sums of threads meet only once
    ranks = tl.zeros([BLOCK, keys.shape[0]], tl.int32)
    before = tl.zeros([BLOCK, keys.shape[0]], tl.int64)
    for start in range(0, many, BLOCK):
        others = tl.load(scratch + start + row, mask=start + row < many, other=v.LOWEST)
        weights = v.weight(v.score(v.value_of(others), peak, temperature))
        ahead = others[:, None] > keys[None, :]
        ranks += ahead.to(tl.int32)
        before += tl.where(ahead, weights[:, None], 0)
    return tl.sum(ranks, 0), tl.sum(before, 0)
