"""Rows whose choice may be among many tokens: top-p without top-k, min-p alone, top-k beyond 64.

`bracket` finds roughly where the last of them lies, `gather_candidates` lists what may take part, in any order; both
take one program a chunk. `selecting` goes on from there."""

from __future__ import annotations

import triton
import triton.language as tl

from . import best, chunks
from . import values as v

#: Chunks are weighed above STEPS - 1 scores, at these shares of the least that matters: top-p of text keeps little.
STEPS = tl.constexpr(4)
_SHARES = tl.constexpr((1.0, 0.8, 0.6, 0.3))


@triton.jit
def _kth_maximum(maxima, groups, count, GROUPS: tl.constexpr):
    """What `count` or some more of a row's group maxima reach, ordered; less than any where there are fewer groups."""
    group = tl.arange(0, GROUPS)
    top = tl.load(maxima + group, mask=group < groups, other=float("-inf"))
    keys = tl.where(group < groups, (v.ordered(top).to(tl.int64) << 32) | group.to(tl.int64), v.LOWEST)
    floor = tl.full([], -(1 << 31), tl.int64)
    if count <= groups:
        floor = best.bound(keys, groups, count, count + (count >> 2)) >> 32
    return floor


@triton.jit
def _least_score(floats, slot, total, vocab):
    """Tokens below this together are too light to matter to top-p, or each of them to min-p."""
    top_p = v.number(floats, slot, v.TOP_P)
    least = tl.log(v.number(floats, slot, v.MIN_P).to(tl.float32))
    if top_p < 1:
        least = tl.maximum(least, tl.log(((1 - top_p) * (total / vocab).to(tl.float64)).to(tl.float32)))
    return least - 1e-3


@triton.jit
def _logit_of(STEP: tl.constexpr, peak, temperature, least):
    return peak + temperature * (least * _SHARES[STEP])


@triton.jit
def _above_logit(x):
    """The least key of a logit x."""
    return tl.maximum(v.ordered(x).to(tl.int64) << 32, v.LOWEST + 1)


@triton.jit(do_not_specialize=["groups", "chunk_count"])
def bracket(
    logits,
    slots,
    floats,
    integers,
    words,
    biases,
    queries,
    places,
    maxima,
    statistics,
    counts,
    profiles,
    brackets,
    stride,
    vocab,
    groups,
    chunk_count,
    CHUNK_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    FAST: tl.constexpr,
):
    """brackets [N, 2]: no key below the first takes part, and for top-p alone all from the second on do.

    profiles [N, STEPS, chunks]: what a chunk's tokens weigh above each of some logits. The last program of a row
    finds where the wanted mass lies."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    top_k, top_p = v.integer(integers, slot, v.TOP_K), v.number(floats, slot, v.TOP_P)
    weighs = (top_k == 0) & (top_p < 1)
    if (v.integer(integers, slot, v.KIND) == v.WIDE) & (weighs | (chunk == 0)):
        # Asked for first, so that the memory works meanwhile
        group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
        ids = group[:, None] * v.GROUP + tl.arange(0, v.GROUP)[None, :]
        real = ids < vocab
        x = tl.load(logits + row * stride + ids, mask=real & weighs, other=float("-inf")).to(tl.float32)
        temperature = v.temperature_of(floats, integers, slot)
        _, peak, _, total = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
        least = _least_score(floats, slot, total, vocab)
        above_all = (v.ordered(peak).to(tl.int64) + 1) << 32
        if weighs:
            x = v.adjusted(
                x, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
            )
            weights = v.exp(v.score(x, peak, temperature), FAST)
            profile = profiles + row * STEPS * chunk_count
            for step in tl.static_range(1, STEPS):
                heavy = tl.where(x >= _logit_of(step, peak, temperature, least), weights, 0.0)
                tl.store(profile + step * chunk_count + chunk, tl.sum(tl.ravel(heavy), 0))
            tl.debug_barrier()
            if tl.atomic_add(counts + row * 2 + 1, 1) == chunk_count - 1:
                steps = tl.arange(0, STEPS)
                part = tl.arange(0, CHUNKS)
                at = profile + steps[:, None] * chunk_count + part[None, :]
                written = (steps > 0)[:, None] & (part < chunk_count)[None, :]
                reached = tl.sum(tl.load(at, mask=written, other=0.0, cache_modifier=".cg"), 1).to(tl.float64)
                reached = tl.where(steps == 0, float("inf"), reached)
                logit = tl.zeros([STEPS], tl.float32)
                for step in tl.static_range(STEPS):
                    logit = tl.where(steps == step, _logit_of(step, peak, temperature, least), logit)
                wanted = top_p * total.to(tl.float64)
                # Sums of float32, so with a margin: whoever selects weighs exactly
                low = tl.max(tl.where(reached >= wanted * 1.0001, _above_logit(logit), v.LOWEST), 0)
                high = tl.min(tl.where(reached <= wanted * 0.9999, _above_logit(logit), above_all), 0)
                tl.store(brackets + row * 2, low)
                tl.store(brackets + row * 2 + 1, tl.maximum(low, high))
        else:
            low = _above_logit(peak + temperature * least)
            if top_k > 0:
                floor = _kth_maximum(maxima + row * groups, groups, top_k.to(tl.int32), GROUPS)
                low = tl.maximum(floor << 32, v.LOWEST + 1)
            tl.store(brackets + row * 2, low)
            tl.store(brackets + row * 2 + 1, above_all)


@triton.jit(do_not_specialize=["room"])
def gather_candidates(
    logits,
    slots,
    floats,
    integers,
    words,
    biases,
    queries,
    places,
    counts,
    brackets,
    listed,
    stride,
    vocab,
    room,
    CHUNK_GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
):
    """listed [N, 2, room] int64: the keys of counts[row, 0] tokens in the first half."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) == v.WIDE:
        group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
        ids = group[:, None] * v.GROUP + tl.arange(0, v.GROUP)[None, :]
        real = ids < vocab
        x = tl.load(logits + row * stride + ids, mask=real, other=float("-inf")).to(tl.float32)
        x = v.adjusted(x, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES)
        floor = (tl.load(brackets + row * 2) >> 32).to(tl.int32)
        taken = ((v.ordered(x) >= floor) & (x > float("-inf"))).to(tl.int32)
        of_groups = tl.sum(taken, 1)
        many = tl.sum(of_groups, 0)
        if many > 0:
            before = tl.atomic_add(counts + row * 2, many)
            place = before + (tl.cumsum(of_groups, 0) - of_groups)[:, None] + tl.cumsum(taken, 1) - 1
            tl.store(listed + row * 2 * room + place, v.key_of(x, ids), mask=taken > 0)
