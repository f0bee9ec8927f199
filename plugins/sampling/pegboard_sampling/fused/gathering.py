"""Rows whose choice may be among many tokens: top-p without top-k, min-p alone, top-k beyond 64.

`bracket` finds where the last of them lies, roughly, from what the pass over the logits left: one program a row.
`gather_candidates` then reads the groups again whose maxima reach that far, one program a part of the row: a small
one, for it waits more than it works. Tokens that surely take part meet their noise there and then; the others are
listed, for `selecting` to decide about.

Bytes: the groups that reach the bracket, and 8 written and read again for each of their tokens that does."""

from __future__ import annotations

import triton
import triton.language as tl

from . import best, chunks, noise
from . import values as v

#: Halvings of the range of logits that matters.
_HALVINGS = tl.constexpr(12)
#: Tokens whose noise is computed at a time.
_AT_ONCE = tl.constexpr(64)


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
def _above_logit(x):
    """The least key of a logit x."""
    return tl.maximum(v.ordered(x).to(tl.int64) << 32, v.LOWEST + 1)


@triton.jit
def _around(profiles, row, chunk_count, of_chunks, sums, scale, wanted, bottom, top, CHUNKS: tl.constexpr):
    """Keys, by the profiles of a row's chunks: what weighs `wanted` reaches down to the first, and what reaches the
    second weighs less. Both lie in bottom .. top or, where they tell nothing, at its ends."""
    part, point = tl.arange(0, CHUNKS)[:, None], tl.arange(0, chunks.POINTS)[None, :]
    at = profiles + (row * 2 * chunk_count + part) * chunks.POINTS + point
    real = part < chunk_count
    limits = tl.load(at, mask=real, other=float("-inf"))
    masses = tl.load(at + chunk_count * chunks.POINTS, mask=real, other=0.0)
    masses = tl.where(masses == masses, masses, 0.0)  # a NaN row is nobody's, but must not be compared
    low, low_end, high, high_end = bottom, top, top, bottom
    above = (v.ordered(top).to(tl.int64) + 1) << 32
    for _ in range(_HALVINGS):
        middle = 0.5 * low + 0.5 * low_end
        # A chunk weighs no less above some logit than above its next point up, and no more than above the next one down
        least = tl.max(tl.where(limits >= middle, masses, 0.0), 1)
        # Sums of float32, so with a margin: whoever selects weighs exactly
        enough = tl.sum(least * scale, 0).to(tl.float64) >= wanted * 1.0001
        low = tl.where(enough, middle, low)
        low_end = tl.where(enough, low_end, middle)
        middle = 0.5 * high + 0.5 * high_end
        most = tl.min(tl.where(limits <= middle, masses, sums[:, None]), 1)
        most = tl.where(of_chunks < middle, 0.0, most)
        fewer = tl.sum(most * scale, 0).to(tl.float64) <= wanted * 0.9999
        above = tl.where(fewer, _above_logit(middle), above)
        high = tl.where(fewer, middle, high)
        high_end = tl.where(fewer, high_end, middle)
    return _above_logit(low), tl.maximum(above, _above_logit(low))


@triton.jit(do_not_specialize=["groups", "chunk_count"])
def bracket(
    slots,
    floats,
    integers,
    maxima,
    statistics,
    profiles,
    brackets,
    totals,
    vocab,
    groups,
    chunk_count,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """brackets [N, 2]: no key below the first takes part, and all from the second on do; none at all in rows that
    choose in another way. totals [N, 2]: the greatest logit, and the row's sum of weights beside it."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) != v.WIDE:
        tl.store(brackets + row * 2, tl.full([], v.HIGHEST, tl.int64))
        tl.store(brackets + row * 2 + 1, tl.full([], v.HIGHEST, tl.int64))
    else:
        temperature = v.temperature_of(floats, integers, slot)
        of_chunks, peak, beside, total = chunks.whole_row(
            statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM
        )
        count, top_p = v.integer(integers, slot, v.TOP_K), v.number(floats, slot, v.TOP_P)
        bottom = peak + temperature * _least_score(floats, slot, total, vocab)
        low = _above_logit(bottom)
        high = low
        if count > 0:
            floor = _kth_maximum(maxima + row * groups, groups, count.to(tl.int32), GROUPS)
            low = tl.maximum(low, tl.maximum(floor << 32, v.LOWEST + 1))
            high = (v.ordered(peak).to(tl.int64) + 1) << 32
        elif top_p < 1:
            part = tl.arange(0, CHUNKS)
            at = statistics + (row * v.STATISTICS + v.SUM) * chunk_count + part
            sums = tl.load(at, mask=part < chunk_count, other=0.0)
            sums = tl.where(sums == sums, sums, 0.0)
            scale = tl.where(beside > float("-inf"), tl.exp(beside), 0.0)
            wanted = top_p * total.to(tl.float64)
            low, high = _around(profiles, row, chunk_count, of_chunks, sums, scale, wanted, bottom, peak, CHUNKS)
        tl.store(brackets + row * 2, low)
        tl.store(brackets + row * 2 + 1, high)
        tl.store(totals + row * 2, peak)
        tl.store(totals + row * 2 + 1, total)


@triton.jit(do_not_specialize=["groups", "parts", "room"])
def gather_candidates(
    logits,
    slots,
    positions,
    floats,
    integers,
    words,
    biases,
    queries,
    places,
    maxima,
    counts,
    brackets,
    totals,
    reached,
    picks,
    weights,
    listed,
    stride,
    vocab,
    groups,
    parts,
    room,
    PART_GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    FAST: tl.constexpr,
):
    """listed [N, 2, room] int64: the keys of counts[row] undecided tokens in the first half; the second is for a part's
    own use. Of its tokens that surely take part each leaves in reached and picks [N, parts] the best with its noise,
    and in weights [N, 2, parts] int64 what they weigh, before and after min-p."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = part * PART_GROUPS + tl.arange(0, PART_GROUPS)
    top = tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf"))
    low = (tl.load(brackets + row * 2) >> 32).to(tl.int32)
    high = (tl.load(brackets + row * 2 + 1) >> 32).to(tl.int32)
    slot = tl.load(slots + row)
    near = (v.ordered(top) >= low) & (top > float("-inf"))
    reach = tl.full([], float("-inf"), tl.float32)
    pick = tl.full([], 0x7FFFFFFF, tl.int32)
    heavy = tl.full([], 0, tl.int64)
    kept_weight = tl.full([], 0, tl.int64)
    if tl.max(near.to(tl.int32), 0) > 0:
        ids = group[:, None] * v.GROUP + tl.arange(0, v.GROUP)[None, :]
        real = near[:, None] & (ids < vocab)
        x = tl.load(logits + row * stride + ids, mask=real, other=float("-inf")).to(tl.float32)
        x = v.adjusted(x, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES)
        key = v.ordered(x)
        taken = (key >= low) & (x > float("-inf"))
        sure = taken & (key >= high)
        # Both counts in one sum, which is below 2**15
        both = tl.where(sure, 1, taken.to(tl.int32) << 16)
        of_groups = tl.sum(both, 1)
        place = (tl.cumsum(of_groups, 0) - of_groups)[:, None] + tl.cumsum(both, 1)
        numbers = tl.sum(of_groups, 0)
        undecided, decided = numbers >> 16, numbers & 0xFFFF
        open = listed + row * 2 * room
        own = open + room + part.to(tl.int64) * (PART_GROUPS * v.GROUP)
        if decided > 0:
            tl.store(own + (place & 0xFFFF) - 1, v.key_of(x, ids), mask=sure)
        if undecided > 0:
            before = tl.atomic_add(counts + row, undecided)
            tl.store(open + before + (place >> 16) - 1, v.key_of(x, ids), mask=taken & (key < high))
        if decided > 0:
            tl.debug_barrier()
            temperature = v.temperature_of(floats, integers, slot)
            seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
            min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
            peak = tl.load(totals + row * 2)
            offsets = tl.arange(0, _AT_ONCE)
            best_noisy = tl.full([_AT_ONCE], float("-inf"), tl.float32)
            best_id = tl.full([_AT_ONCE], 0x7FFFFFFF, tl.int32)
            of_all = tl.zeros([_AT_ONCE], tl.int64)
            of_kept = tl.zeros([_AT_ONCE], tl.int64)
            for start in range(0, decided, _AT_ONCE):
                keys = tl.load(own + start + offsets, mask=start + offsets < decided, other=v.LOWEST)
                there = keys > v.LOWEST
                scores = v.score(v.value_of(keys), peak, temperature)
                id = v.id_of(keys)
                each = tl.where(there, v.weight(scores), 0)
                kept = there & (tl.exp(scores) >= min_p)
                noisy = scores + noise.gumbel(id, position, seed, noise.TOKENS, FAST)
                # Of equals the first: a thread's tokens come by their ids
                better = kept & (noisy > best_noisy)
                best_noisy = tl.where(better, noisy, best_noisy)
                best_id = tl.where(better, id, best_id)
                of_all += each
                of_kept += tl.where(kept, each, 0)
            reach, pick = v.first_of_best(best_noisy, best_id)
            heavy = tl.sum(of_all, 0)
            kept_weight = tl.sum(of_kept, 0)
    at = row * parts + part
    tl.store(reached + at, reach)
    tl.store(picks + at, pick)
    tl.store(weights + row * parts + at, heavy)
    tl.store(weights + (row + 1) * parts + at, kept_weight)
