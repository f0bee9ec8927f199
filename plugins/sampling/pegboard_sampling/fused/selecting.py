"""Who takes part in rows whose choice may be among many tokens, and the choice: one program a row. For those that count
tokens, and where what takes part is looked at again; otherwise `picking` needs less.

`select` finds the last key that takes part among those that `gathering` listed: by weighing what lies above 16
thresholds at once, between those that bracket the answer, while decided tokens leave the list in each round; then by
comparing those that are left. Keys are distinct and weights integers, so ties and order change nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from . import best, chunks, noise
from . import values as v

THRESHOLDS = tl.constexpr(16)
#: Undecided tokens that are compared with each other at last, with TURN of them at a time.
AT_ONCE, TURN = tl.constexpr(512), tl.constexpr(16)


@triton.jit
def _thresholds(low, high, by_key):
    """int64 [16] from low up, evenly in value or in key, within low .. high."""
    j = tl.arange(0, THRESHOLDS)
    bottom, top = v.value_of(low), v.value_of(high - 1)
    even = bottom + (top - bottom) * (j.to(tl.float32) / THRESHOLDS)
    even = tl.where(even == even, even, top)
    of_value = v.ordered(even).to(tl.int64) << 32
    step = tl.maximum((high >> 4) - (low >> 4), 1)
    found = tl.where(by_key, low + j.to(tl.int64) * step, of_value)
    return tl.where(j == 0, low, tl.minimum(tl.maximum(found, low), high))


@triton.jit
def _above(listed, count, thresholds, peak, temperature, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """int64 [16]: weight, or number, of the listed keys that reach each threshold."""
    columns = tl.arange(0, BLOCK)
    # Tokens along the last axis: each thread holds all thresholds for its own, and sums of threads meet only once
    found = tl.zeros([THRESHOLDS, BLOCK], tl.int64)
    keys = tl.load(listed + columns, mask=columns < count, other=v.LOWEST)
    for start in range(0, count, BLOCK):
        ahead = start + BLOCK + columns
        following = tl.load(listed + ahead, mask=ahead < count, other=v.LOWEST)
        if WEIGHTS:
            each = v.weight(v.score(v.value_of(keys), peak, temperature))
        else:
            each = tl.full([BLOCK], 1, tl.int64)
        # What fills the last block is LOWEST, below any threshold
        found += tl.where(keys[None, :] >= thresholds[:, None], each[None, :], 0)
        keys = following
    return tl.sum(found, 1)


@triton.jit
def _mass(listed, count, low, peak, temperature, BLOCK: tl.constexpr):
    """int64: weight of the listed keys that reach `low`."""
    columns = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        keys = tl.load(listed + start + columns, mask=start + columns < count, other=v.LOWEST)
        found += tl.where(keys >= low, v.weight(v.score(v.value_of(keys), peak, temperature)), 0)
    return tl.sum(found, 0)


@triton.jit
def _narrow(low, high, thresholds, enough):
    """The bracket when `enough` [16] says which thresholds have enough above them; some has."""
    lower = tl.max(tl.where(enough, thresholds, low), 0)
    upper = tl.min(tl.where(enough, high, thresholds), 0)
    return lower, tl.minimum(upper, high)


@triton.jit
def _kth_key(listed, count, low, high, k, BLOCK: tl.constexpr):
    """The k-th greatest of the listed keys, which is in low .. high - 1."""
    by_key = False
    while high - 1 != low:
        thresholds = _thresholds(low, high, by_key)
        lower, upper = _narrow(low, high, thresholds, _above(listed, count, thresholds, 0.0, 1.0, False, BLOCK) >= k)
        by_key = ((upper >> 3) - (lower >> 3)) >= ((high >> 6) - (low >> 6))
        low = lower
        high = upper
    return low


@triton.jit(do_not_specialize=["vocab", "chunk_count", "room"])
def select(
    slots,
    positions,
    floats,
    integers,
    statistics,
    counts,
    bounds,
    listed,
    ids_out,
    support,
    mass,
    vocab,
    chunk_count,
    room,
    CHUNKS: tl.constexpr,
    TELLS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) == v.WIDE:
        temperature = v.temperature_of(floats, integers, slot)
        _, peak, _, total = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
        open = listed + row * 2 * room
        taken = open + room
        many = tl.load(counts + row)  # undecided
        low = tl.maximum(v.ordered(tl.load(bounds + row * 2)).to(tl.int64) << 32, v.LOWEST + 1)
        high = (v.ordered(peak).to(tl.int64) + 1) << 32
        count, top_p = v.integer(integers, slot, v.TOP_K), v.number(floats, slot, v.TOP_P)
        weighed = total.to(tl.float64) * v.UNIT
        if (count > 0) & (many > AT_ONCE):
            if many > count:
                low = _kth_key(open, many, low, high, count, BLOCK)
            weighed = _mass(open, many, low, peak, temperature, PART).to(tl.float64)
            count = tl.full([], 0, tl.int64)
        few = tl.full([], 0, tl.int32)  # taken
        heavy = tl.full([], 0, tl.int64)  # their weight
        last = tl.full([], v.HIGHEST, tl.int64)
        by_key = False
        offsets = tl.arange(0, PART)
        while many > AT_ONCE:
            lower, upper = low, low
            if top_p < 1:
                thresholds = _thresholds(low, high, by_key)
                above = heavy + _above(open, many, thresholds, peak, temperature, True, BLOCK)
                enough = above.to(tl.float64) >= weighed * top_p
                if tl.max(enough.to(tl.int32), 0) > 0:
                    lower, upper = _narrow(low, high, thresholds, enough)
            left = 0
            found = tl.zeros([PART], tl.int64)
            lasts = tl.full([PART], v.HIGHEST, tl.int64)
            leasts = tl.full([PART], v.HIGHEST, tl.int64)
            mosts = tl.full([PART], v.LOWEST, tl.int64)
            keys = tl.load(open + offsets, mask=offsets < many, other=v.LOWEST)
            for start in range(0, many, PART):
                ahead = start + PART + offsets
                following = tl.load(open + ahead, mask=ahead < many, other=v.LOWEST)
                surely = keys >= upper
                maybe = (keys >= lower) & (keys < upper)
                # Both counts in one sum, which is below 2**15
                place = tl.cumsum(surely.to(tl.int32) + (maybe.to(tl.int32) << 16), 0)
                tl.store(taken + few + (place & 0xFFFF) - 1, keys, mask=surely)
                # In place: what is written was read before the sum over the block was known
                tl.store(open + left + (place >> 16) - 1, keys, mask=maybe)
                both = tl.max(tl.where(offsets == PART - 1, place, 0), 0)
                few += both & 0xFFFF
                left += both >> 16
                found += tl.where(surely, v.weight(v.score(v.value_of(keys), peak, temperature)), 0)
                lasts = tl.where(surely, tl.minimum(lasts, keys), lasts)
                leasts = tl.where(maybe, tl.minimum(leasts, keys), leasts)
                mosts = tl.where(maybe, tl.maximum(mosts, keys), mosts)
                keys = following
            heavy += tl.sum(found, 0)
            last = tl.minimum(last, tl.min(lasts, 0))
            least = tl.min(leasts, 0)
            most = tl.max(mosts, 0)
            tl.debug_barrier()
            by_key = left * 2 > many
            many = left
            low = tl.maximum(lower, least)
            high = tl.minimum(upper, most + 1)
        if many > 0:
            at = tl.arange(0, AT_ONCE)
            keys = tl.load(open + at, mask=at < many, other=v.LOWEST)
            place, before = best.places(open, many, keys, peak, temperature, TURN)
            among = keys >= low
            if count > 0:
                among = among & (place < count)
                weights = v.weight(v.score(v.value_of(keys), peak, temperature))
                weighed = tl.sum(tl.where(among, weights, 0), 0).to(tl.float64)
            if top_p < 1:
                among = among & ((heavy + before).to(tl.float64) < weighed * top_p)
            tl.store(taken + few + tl.cumsum(among.to(tl.int32), 0) - 1, keys, mask=among)
            few += tl.sum(among.to(tl.int32), 0)
            last = tl.minimum(last, tl.min(tl.where(among, keys, v.HIGHEST), 0))
            tl.debug_barrier()
        seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
        min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
        reach = tl.full([], float("-inf"), tl.float32)
        chosen = tl.full([], 0x7FFFFFFF, tl.int32)
        heavy = tl.full([], 0, tl.int64)
        for start in range(0, few, PART):
            at = start + offsets
            keys = tl.load(taken + at, mask=at < few, other=v.LOWEST)
            scores = v.score(v.value_of(keys), peak, temperature)
            ids = v.id_of(keys)
            kept = (at < few) & (tl.exp(scores) >= min_p)
            noisy = tl.where(kept, scores + noise.gumbel(ids, position, seed, noise.TOKENS, FAST), float("-inf"))
            found, id = v.first_of_best(noisy, ids)
            id = tl.where(found > float("-inf"), id, 0x7FFFFFFF)
            chosen = tl.where(found > reach, id, tl.where(found == reach, tl.minimum(id, chosen), chosen))
            reach = tl.maximum(reach, found)
            heavy += tl.sum(tl.where(kept, v.weight(scores), 0), 0)
        tl.store(ids_out + row, chosen.to(tl.int64))
        if TELLS:
            tl.store(support + row, last)
            tl.store(mass + row, heavy.to(tl.float32) / v.UNIT)
