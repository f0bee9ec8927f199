"""The choice of rows that count no tokens, among those that `gathering` listed: one program a row.

Those that take part are a row's first by key, so whatever is best of all of them with its noise and takes part is the
choice. Does it not, neither do those behind it, and the best of those ahead is next: a few tries at most, mostly one,
and no need to know who takes part."""

from __future__ import annotations

import triton
import triton.language as tl

from . import chunks, gathering
from . import values as v


@triton.jit
def _mass_ahead(listed, sizes, span, key, peak, temperature, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """int64: weight of the keys above `key`, of which each of PARTS has listed `sizes`, `span` apart."""
    starts, column = tl.arange(0, PARTS)[:, None] * span, tl.arange(0, WIDTH)[None, :]
    mass = tl.zeros([PARTS, WIDTH], tl.int64)
    for start in range(0, tl.max(sizes, 0), WIDTH):
        there = start + column < sizes[:, None]
        keys = tl.load(listed + starts + start + column, mask=there, other=v.LOWEST)
        mass += tl.where(keys > key, v.weight(v.score(v.value_of(keys), peak, temperature)), 0)
    return tl.sum(tl.sum(mass, 1), 0)


@triton.jit
def _best_ahead(
    listed,
    sizes,
    span,
    key,
    peak,
    temperature,
    min_p,
    position,
    seed,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):
    """The key above `key` of the best perturbed score."""
    starts, column = tl.arange(0, PARTS)[:, None] * span, tl.arange(0, WIDTH)[None, :]
    reach = tl.full([PARTS, WIDTH], float("-inf"), tl.float32)
    best = tl.full([PARTS, WIDTH], v.LOWEST, tl.int64)
    for start in range(0, tl.max(sizes, 0), WIDTH):
        there = start + column < sizes[:, None]
        keys = tl.load(listed + starts + start + column, mask=there, other=v.LOWEST)
        reach, best = gathering.best_noisy(
            keys, keys > key, peak, temperature, min_p, position, seed, reach, best, FAST
        )
    reach, best = tl.reduce((reach, best), 1, v.before)
    return tl.reduce((reach, best), 0, v.before)[1]


@triton.jit(do_not_specialize=["chunk_count", "parts", "room", "span"])
def pick(
    slots,
    positions,
    floats,
    integers,
    statistics,
    part_counts,
    reached,
    best_keys,
    listed,
    ids_out,
    chunk_count,
    parts,
    room,
    span,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):
    """WIDTH keys of each of PARTS at a time."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) == v.WIDE:
        part = tl.arange(0, PARTS)
        at, there = row * parts + part, part < parts
        noisy = tl.load(reached + at, mask=there, other=float("-inf"))
        keys = tl.load(best_keys + at, mask=there, other=v.LOWEST)
        sizes = tl.load(part_counts + at, mask=there, other=0)
        key = tl.reduce((noisy, keys), 0, v.before)[1]
        top_p = v.number(floats, slot, v.TOP_P)
        if top_p < 1:
            temperature = v.temperature_of(floats, integers, slot)
            _, peak, _, total = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
            wanted = total.to(tl.float64) * v.UNIT * top_p
            own = listed + row * 2 * room
            seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
            min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
            ahead = _mass_ahead(own, sizes, span, key, peak, temperature, PARTS, WIDTH)
            # A row that fails has no key, and nothing is compared with a NaN
            while (key > v.LOWEST) & (ahead > 0) & (ahead.to(tl.float64) >= wanted):
                key = _best_ahead(own, sizes, span, key, peak, temperature, min_p, position, seed, PARTS, WIDTH, FAST)
                ahead = _mass_ahead(own, sizes, span, key, peak, temperature, PARTS, WIDTH)
        tl.store(ids_out + row, v.id_of(key).to(tl.int64))
