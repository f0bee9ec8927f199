"""The choice of rows that count no tokens, among those that `gathering` listed: one program a row.

Those that take part are a row's first by key, so whatever is best of all of them with its noise and takes part is the
choice. Does it not, neither do those behind it, and the best of those ahead is next: a few tries at most, mostly one,
and no need to know who takes part."""

from __future__ import annotations

import triton
import triton.language as tl

from . import chunks, gathering, selecting
from . import values as v


@triton.jit
def _best_ahead(listed, many, key, peak, temperature, min_p, position, seed, FAST: tl.constexpr, TURN: tl.constexpr):
    """The key of the best perturbed score among the listed keys above `key`."""
    reaches = tl.full([TURN], float("-inf"), tl.float32)
    keys = tl.full([TURN], v.LOWEST, tl.int64)
    for start in range(0, many, TURN):
        at = start + tl.arange(0, TURN)
        found = tl.load(listed + at, mask=at < many, other=v.LOWEST)
        reaches, keys = gathering.best_noisy(
            found, found > key, peak, temperature, min_p, position, seed, reaches, keys, FAST
        )
    return tl.reduce((reaches, keys), 0, v.before)[1]


@triton.jit(do_not_specialize=["chunk_count", "parts", "room"])
def pick(
    slots,
    positions,
    floats,
    integers,
    statistics,
    counts,
    reached,
    best_keys,
    listed,
    ids_out,
    chunk_count,
    parts,
    room,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    TURN: tl.constexpr,
):
    """BLOCK listed keys are weighed at a time, TURN get their noise."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) == v.WIDE:
        part = tl.arange(0, PARTS)
        noisy = tl.load(reached + row * parts + part, mask=part < parts, other=float("-inf"))
        keys = tl.load(best_keys + row * parts + part, mask=part < parts, other=v.LOWEST)
        key = tl.reduce((noisy, keys), 0, v.before)[1]
        top_p = v.number(floats, slot, v.TOP_P)
        if top_p < 1:
            temperature = v.temperature_of(floats, integers, slot)
            _, peak, _, total = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
            wanted = total.to(tl.float64) * v.UNIT * top_p
            own, many = listed + row * 2 * room, tl.load(counts + row)
            seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
            min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
            ahead = selecting.mass_from(own, many, key + 1, peak, temperature, BLOCK)
            # A row that fails has no key, and nothing is compared with a NaN
            while (key > v.LOWEST) & (ahead > 0) & (ahead.to(tl.float64) >= wanted):
                key = _best_ahead(own, many, key, peak, temperature, min_p, position, seed, FAST, TURN)
                ahead = selecting.mass_from(own, many, key + 1, peak, temperature, BLOCK)
        tl.store(ids_out + row, v.id_of(key).to(tl.int64))
