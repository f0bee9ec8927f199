"""The choice of rows whose choice may be among many tokens, one program a row.

`select` finds the last key that takes part among those that `gathering` could not decide about: by counting or weighing
what lies above 16 thresholds at once, between those that bracket the answer, while decided tokens leave the list in
each round; then by comparing those that are left. Keys are distinct and weights integers, so ties and order change
nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from . import best, noise
from . import values as v

THRESHOLDS = tl.constexpr(16)
#: Undecided tokens that are compared with each other at last, with TURN of them at a time.
AT_ONCE, TURN = tl.constexpr(128), tl.constexpr(16)


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
def _each(keys, counting, peak, temperature):
    """What keys add up to: 1 each where tokens are counted, else their weights."""
    return tl.where(counting, 1, v.weight(v.score(v.value_of(keys), peak, temperature)))


@triton.jit
def _above(listed, many, thresholds, counting, peak, temperature, BLOCK: tl.constexpr):
    """int64 [16]: weight, or number, of the listed keys that reach each threshold."""
    columns = tl.arange(0, BLOCK)
    # Tokens along the last axis: each thread holds all thresholds for its own, and sums of threads meet only once
    found = tl.zeros([THRESHOLDS, BLOCK], tl.int64)
    keys = tl.load(listed + columns, mask=columns < many, other=v.LOWEST)
    for start in range(0, many, BLOCK):
        ahead = start + BLOCK + columns
        following = tl.load(listed + ahead, mask=ahead < many, other=v.LOWEST)
        each = _each(keys, counting, peak, temperature)
        # What fills the last block is LOWEST, below any threshold
        found += tl.where(keys[None, :] >= thresholds[:, None], each[None, :], 0)
        keys = following
    return tl.sum(found, 1)


@triton.jit
def _narrow(low, high, thresholds, enough):
    """The bracket when `enough` [16] says which thresholds have enough above them; some has."""
    lower = tl.max(tl.where(enough, thresholds, low), 0)
    upper = tl.min(tl.where(enough, high, thresholds), 0)
    return lower, tl.minimum(upper, high)


@triton.jit
def _take(
    open,
    taken,
    scratch,
    many,
    low,
    high,
    ahead,
    wanted,
    counting,
    peak,
    temperature,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Moves to `taken` those of the `many` open keys before which less than `wanted` comes, `ahead` of them all
    included. Returns how many, what they weigh, and the last. The last is in low .. high - 1."""
    few = tl.full([], 0, tl.int32)
    heavy = tl.full([], 0, tl.int64)
    last = tl.full([], v.HIGHEST, tl.int64)
    by_key = False
    offsets = tl.arange(0, PART)
    while many > AT_ONCE:
        thresholds = _thresholds(low, high, by_key)
        above = ahead + _above(open, many, thresholds, counting, peak, temperature, BLOCK)
        enough = above.to(tl.float64) >= wanted
        lower, upper = low, low
        if tl.max(enough.to(tl.int32), 0) > 0:
            lower, upper = _narrow(low, high, thresholds, enough)
        left = 0
        found = tl.zeros([PART], tl.int64)
        counted = tl.zeros([PART], tl.int64)
        lasts = tl.full([PART], v.HIGHEST, tl.int64)
        leasts = tl.full([PART], v.HIGHEST, tl.int64)
        mosts = tl.full([PART], v.LOWEST, tl.int64)
        keys = tl.load(open + offsets, mask=offsets < many, other=v.LOWEST)
        for start in range(0, many, PART):
            following = tl.load(open + start + PART + offsets, mask=start + PART + offsets < many, other=v.LOWEST)
            surely = (keys >= upper) & (keys > v.LOWEST)
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
            counted += surely.to(tl.int64)
            lasts = tl.where(surely, tl.minimum(lasts, keys), lasts)
            leasts = tl.where(maybe, tl.minimum(leasts, keys), leasts)
            mosts = tl.where(maybe, tl.maximum(mosts, keys), mosts)
            keys = following
        weight = tl.sum(found, 0)
        heavy += weight
        ahead += tl.where(counting, tl.sum(counted, 0), weight)
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
        tl.store(scratch + at, _each(keys, counting, peak, temperature))
        tl.debug_barrier()
        _, before = best.places(open, scratch, many, keys, TURN)
        among = (at < many) & ((ahead + before).to(tl.float64) < wanted)
        tl.store(taken + few + tl.cumsum(among.to(tl.int32), 0) - 1, keys, mask=among)
        few += tl.sum(among.to(tl.int32), 0)
        heavy += tl.sum(tl.where(among, v.weight(v.score(v.value_of(keys), peak, temperature)), 0), 0)
        last = tl.minimum(last, tl.min(tl.where(among, keys, v.HIGHEST), 0))
        tl.debug_barrier()
    return few, heavy, last


@triton.jit
def _best_that_takes_part(
    open,
    many,
    ahead,
    wanted,
    counting,
    reach,
    chosen,
    peak,
    temperature,
    min_p,
    position,
    seed,
    FAST: tl.constexpr,
    PART: tl.constexpr,
):
    """The choice without knowing where the set ends. `reach` and `chosen` are of the best token that surely takes part;
    while one of the `many` open ones is better, it is asked what comes before it. If that is too much, it and all that
    follow it are out. Most of the mass is in the set, so that seldom takes more than one question."""
    offsets = tl.arange(0, PART)
    bound = tl.full([], v.LOWEST, tl.int64)
    searching = many > 0
    while searching:
        best_noisy = tl.full([PART], float("-inf"), tl.float32)
        best_key = tl.full([PART], v.LOWEST, tl.int64)
        for start in range(0, many, PART):
            keys = tl.load(open + start + offsets, mask=start + offsets < many, other=v.LOWEST)
            scores = v.score(v.value_of(keys), peak, temperature)
            id = v.id_of(keys)
            noisy = scores + noise.gumbel(id, position, seed, noise.TOKENS, FAST)
            possible = (keys > bound) & (tl.exp(scores) >= min_p)
            better = possible & ((noisy > best_noisy) | ((noisy == best_noisy) & (id < v.id_of(best_key))))
            best_noisy = tl.where(better, noisy, best_noisy)
            best_key = tl.where(better, keys, best_key)
        noisy, id = v.first_of_best(best_noisy, v.id_of(best_key))
        key = tl.max(tl.where((best_noisy == noisy) & (v.id_of(best_key) == id), best_key, v.LOWEST), 0)
        searching = (noisy > reach) | ((noisy == reach) & (id < chosen))
        if searching:
            found = tl.zeros([PART], tl.int64)
            for start in range(0, many, PART):
                keys = tl.load(open + start + offsets, mask=start + offsets < many, other=v.LOWEST)
                found += tl.where(keys > key, _each(keys, counting, peak, temperature), 0)
            searching = (ahead + tl.sum(found, 0)).to(tl.float64) >= wanted
            reach = tl.where(searching, reach, noisy)
            chosen = tl.where(searching, chosen, id)
            bound = key
    return reach, chosen


@triton.jit(do_not_specialize=["parts", "room"])
def select(
    slots,
    positions,
    floats,
    integers,
    counts,
    brackets,
    totals,
    reached,
    picks,
    weights,
    listed,
    scratch,
    ids_out,
    support,
    mass,
    parts,
    room,
    PARTS: tl.constexpr,
    TELLS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Of the tokens that surely take part those are known, of each part of the row, that come first with their noise,
    and what they weigh."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) == v.WIDE:
        temperature = v.temperature_of(floats, integers, slot)
        peak, total = tl.load(totals + row * 2), tl.load(totals + row * 2 + 1)
        low, high = tl.load(brackets + row * 2), tl.load(brackets + row * 2 + 1)
        count, top_p = v.integer(integers, slot, v.TOP_K), v.number(floats, slot, v.TOP_P)
        part = tl.arange(0, PARTS)
        real = part < parts
        of_parts = weights + row * 2 * parts + part
        ahead = tl.sum(tl.load(of_parts, mask=real, other=0), 0)
        kept_weight = tl.sum(tl.load(of_parts + parts, mask=real, other=0), 0)
        reach, chosen = v.first_of_best(
            tl.load(reached + row * parts + part, mask=real, other=float("-inf")),
            tl.load(picks + row * parts + part, mask=real, other=0x7FFFFFFF),
        )
        seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
        min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
        last = high
        own = scratch + row * best.SCRATCH
        open = listed + row * 2 * room
        taken = open + room
        few = tl.load(counts + row)
        weighed = total.to(tl.float64) * v.UNIT
        if not TELLS:
            if (count > 0) != (top_p < 1):
                counting = count > 0
                wanted = tl.where(counting, count.to(tl.float64), weighed * top_p)
                reach, chosen = _best_that_takes_part(
                    open,
                    few,
                    ahead,
                    wanted,
                    counting,
                    reach,
                    chosen,
                    peak,
                    temperature,
                    min_p,
                    position,
                    seed,
                    FAST,
                    PART,
                )
                few = 0
        # By number, then by weight among those that are left
        for stage in range(2):
            counting = stage == 0
            if tl.where(counting, count > 0, (top_p < 1) & (few > 0)):
                wanted = tl.where(counting, count.to(tl.float64), weighed * top_p)
                few, heavy, end = _take(
                    open, taken, own, few, low, high, ahead, wanted, counting, peak, temperature, BLOCK, PART
                )
                weighed = tl.where(counting, heavy.to(tl.float64), weighed)
                last = tl.minimum(high, end)
                low = last
                spare = open
                open = taken
                taken = spare
        offsets = tl.arange(0, PART)
        for start in range(0, few, PART):
            there = start + offsets < few
            keys = tl.load(open + start + offsets, mask=there, other=v.LOWEST)
            scores = v.score(v.value_of(keys), peak, temperature)
            ids = v.id_of(keys)
            kept = there & (tl.exp(scores) >= min_p)
            noisy = tl.where(kept, scores + noise.gumbel(ids, position, seed, noise.TOKENS, FAST), float("-inf"))
            found, id = v.first_of_best(noisy, ids)
            id = tl.where(found > float("-inf"), id, 0x7FFFFFFF)
            chosen = tl.where(found > reach, id, tl.where(found == reach, tl.minimum(id, chosen), chosen))
            reach = tl.maximum(reach, found)
            kept_weight += tl.sum(tl.where(kept, v.weight(scores), 0), 0)
        tl.store(ids_out + row, chosen.to(tl.int64))
        if TELLS:
            tl.store(support + row, last)
            tl.store(mass + row, kept_weight.to(tl.float32) / v.UNIT)
