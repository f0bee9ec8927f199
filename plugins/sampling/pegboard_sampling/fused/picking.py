"""The choice of rows that count no tokens, among those that `gathering` listed: one program a row.

Those that take part are a row's first by key, so whatever is best of all of them with its noise and takes part is the
choice. Does it not, neither do those behind it, and the best of those ahead is next: a few tries at most, mostly one,
and no need to know who takes part. Mostly not even that: where so little can lie ahead of the best one that it surely
takes part, nothing is weighed."""

from __future__ import annotations

import triton
import triton.language as tl

from . import bounding, chunks
from . import values as v


@triton.jit
def _ahead(listed, noises, sizes, span, key, peak, temperature, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Of the keys above `key`, of which each of PARTS has listed `sizes`, `span` apart: int64 weight, and the key of
    the best perturbed score, LOWEST for none."""
    starts, column = tl.arange(0, PARTS)[:, None] * span, tl.arange(0, WIDTH)[None, :]
    mass = tl.zeros([PARTS, WIDTH], tl.int64)
    reach = tl.full([PARTS, WIDTH], v.LOWEST, tl.int64)
    best = tl.full([PARTS, WIDTH], v.LOWEST, tl.int64)
    for start in range(0, tl.max(sizes, 0), WIDTH):
        at = starts + start + column
        there = start + column < sizes[:, None]
        keys = tl.load(listed + at, mask=there, other=v.LOWEST)
        noisy = tl.load(noises + at, mask=there, other=float("-inf"))
        ahead = keys > key
        mass += tl.where(ahead, v.weight(v.score(v.value_of(keys), peak, temperature)), 0)
        noisy_keys = tl.where(ahead, v.key_of(noisy, v.id_of(keys)), v.LOWEST)
        best = tl.where(noisy_keys > reach, keys, best)
        reach = tl.maximum(reach, noisy_keys)
    return tl.sum(tl.ravel(mass), 0), v.foremost(reach, best)[1]


@triton.jit(do_not_specialize=["chunk_count", "parts", "room", "span"])
def pick(
    slots,
    floats,
    integers,
    statistics,
    profiles,
    part_counts,
    reached,
    best_keys,
    listed,
    noises,
    ids_out,
    chunk_count,
    parts,
    room,
    span,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH keys of each of PARTS at a time."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) == v.WIDE:
        part = tl.arange(0, PARTS)
        at, there = row * parts + part, part < parts
        noisy_keys = tl.load(reached + at, mask=there, other=v.LOWEST)
        keys = tl.load(best_keys + at, mask=there, other=v.LOWEST)
        sizes = tl.load(part_counts + at, mask=there, other=0)
        key = v.foremost(noisy_keys, keys)[1]
        top_p = v.number(floats, slot, v.TOP_P)
        if top_p < 1:
            temperature = v.temperature_of(floats, integers, slot)
            of_chunks, peak, beside, sums = chunks.each_chunk(
                statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM
            )
            wanted = top_p * tl.sum(sums, 0).to(tl.float64)
            own = listed + row * 2 * room
            noisy = noises + row * 4 * room + 2 * room
            tries = key > v.LOWEST  # a row that fails has none
            while tries:
                tries = bounding.may_weigh(
                    profiles, row, chunk_count, of_chunks, beside, sums, temperature, v.value_of(key), wanted, CHUNKS
                )
                if tries:
                    mass, following = _ahead(own, noisy, sizes, span, key, peak, temperature, PARTS, WIDTH)
                    tries = (mass > 0) & (mass.to(tl.float64) >= wanted * v.UNIT) & (following > key)
                    key = tl.where(tries, following, key)
        tl.store(ids_out + row, v.id_of(key).to(tl.int64))
