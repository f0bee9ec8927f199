"""The k <= 64 best tokens of a row from its groups' maxima.

They lie in the k groups whose maxima come first, ties by lower index; so only those are read again. Usually few of
their tokens reach the k-th maximum, and these are sorted at once. Otherwise the groups are merged one by one."""

from __future__ import annotations

import triton
import triton.language as tl

from . import values as v

#: Tokens that are sorted at once.
AT_ONCE = tl.constexpr(256)
MOST = tl.constexpr(64)


@triton.jit
def _read(logits, ids, real, slot, floats, integers, words, biases, vocab, WORDS: tl.constexpr, BIASES: tl.constexpr):
    x = tl.load(logits + ids, mask=real, other=float("-inf")).to(tl.float32)
    return v.adjusted(x, ids, real, slot, floats, integers, words, biases, vocab, WORDS, BIASES)


@triton.jit
def best_tokens(
    logits,
    maxima,
    scratch,
    count,
    slot,
    floats,
    integers,
    words,
    biases,
    vocab,
    groups,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
):
    """Keys [64] of the `count` best, best first, then LOWEST. `logits`, `maxima` and `scratch` [AT_ONCE] are the
    row's own; GROUPS >= 64 is a power of two."""
    group = tl.arange(0, GROUPS)
    top = tl.load(maxima + group, mask=group < groups, other=float("-inf"))
    packed = (v.ordered(top).to(tl.int64) << 32) | (GROUPS - 1 - group).to(tl.int64)
    packed = tl.where(group < groups, packed, v.LOWEST)
    packed = tl.topk(packed, MOST)
    rank = tl.arange(0, MOST)
    floor = tl.max(tl.where(rank == count - 1, packed, v.LOWEST), 0) >> 32
    chosen = GROUPS - 1 - (packed & 0xFFFFFFFF).to(tl.int32)
    column = tl.arange(0, v.GROUP)
    ids = chosen[:, None] * v.GROUP + column[None, :]
    real = ((rank < count) & (packed != v.LOWEST))[:, None] & (ids < vocab)
    x = _read(logits, ids, real, slot, floats, integers, words, biases, vocab, WORDS, BIASES)
    taken = (real & (v.ordered(x).to(tl.int64) >= floor)).to(tl.int32)
    of_groups = tl.sum(taken, 1)
    candidates = tl.sum(of_groups, 0)
    best = tl.full([MOST], v.LOWEST, tl.int64)
    if candidates <= AT_ONCE:
        place = (tl.cumsum(of_groups, 0) - of_groups)[:, None] + tl.cumsum(taken, 1) - 1
        tl.store(scratch + place, ids, mask=taken > 0)
        tl.debug_barrier()
        at = tl.arange(0, AT_ONCE)
        few = tl.load(scratch + at, mask=at < candidates, other=0)
        z = _read(logits, few, at < candidates, slot, floats, integers, words, biases, vocab, WORDS, BIASES)
        best = tl.topk(tl.where(at < candidates, v.key_of(z, few), v.LOWEST), MOST)
    else:
        step = 0
        last = tl.full([], v.LOWEST, tl.int64)
        next = tl.max(packed, 0)
        # A group can add something while its maximum reaches the worst token kept
        while (step < count) & ((next >> 32) >= (last >> 32)):
            token = tl.sum(tl.where(rank == step, chosen, 0), 0) * v.GROUP + column
            there = (next != v.LOWEST) & (token < vocab)
            y = _read(logits, token, there, slot, floats, integers, words, biases, vocab, WORDS, BIASES)
            more = tl.topk(tl.where(there, v.key_of(y, token), v.LOWEST), MOST)
            best = tl.topk(tl.cat(best, more, can_reorder=True), MOST)
            last = tl.max(tl.where(rank == count - 1, best, v.LOWEST), 0)
            step += 1
            next = tl.max(tl.where(rank == step, packed, v.LOWEST), 0)
    return tl.where(rank < count, best, v.LOWEST)
