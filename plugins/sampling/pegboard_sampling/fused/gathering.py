"""Lists the candidates of rows whose choice may be among many tokens: top-p without top-k, min-p alone, top-k beyond
64.

Of the groups that reach the row's bound (`bounding`) the logits are read again, and the tokens that do are listed in
any order: one program a part of the row, one turn a tile. It first leaves the ids of a part's candidates side by side,
so that what is computed of candidates alone occupies all threads: their keys, and where no tokens are counted their
noise, and which is the part's best. Programs are single warps, so that nothing in them waits for others.

Bytes: the groups that reach the bound, and 12 written for each token that does. Limit: bandwidth; with many candidates
the noise's arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from . import noise
from . import values as v


@triton.jit
def _ones(bits):
    """How many bits of uint32 are 1."""
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)


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
    bounds,
    part_counts,
    reached,
    best_keys,
    listed,
    noises,
    stride,
    vocab,
    groups,
    parts,
    room,
    TILE_GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    CHOOSES: tl.constexpr,
    FAST: tl.constexpr,
    THREADS: tl.constexpr,
):
    """listed [N, 2, room] int64: keys in the first half, counts[row] of them. With CHOOSES those of each part stand
    where the part begins, part_counts [N, parts], and at the same places of the second half of `noises`, which is
    `listed` as float32 [N, 4 room], their perturbed scores, -inf below min-p; reached [N, parts]: the best of these,
    as a key, and best_keys [N, parts]: whose it is."""
    # The pass before read the rows in order: its last ones may still be in the L2
    part, row = tl.program_id(0), (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    floor = tl.load(bounds + row * 2)
    slot = tl.load(slots + row)
    start_of_part = part * TILES * TILE_GROUPS * v.GROUP
    found_ids = noises + row * 4 * room + 2 * room + start_of_part
    thread = tl.arange(0, THREADS)
    many = tl.full([], 0, tl.int32)
    for tile in range(TILES):
        first = (part * TILES + tile) * TILE_GROUPS
        group = first + tl.arange(0, TILE_GROUPS)
        top = tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf"))
        reaches = top >= floor
        if tl.max(reaches.to(tl.int32), 0) > 0:
            ids = group[:, None] * v.GROUP + tl.arange(0, v.GROUP)[None, :]
            real = reaches[:, None] & (ids < vocab)
            x = tl.load(logits + row * stride + ids, mask=real, other=float("-inf")).to(tl.float32)
            x = v.adjusted(
                x, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
            )
            # A bit for each of the tokens that a thread holds
            adjacent: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
            turns: tl.constexpr = TILE_GROUPS * v.GROUP // (THREADS * adjacent)
            tl.static_assert(turns * adjacent <= 32)
            x = tl.permute(tl.reshape(x, [turns, THREADS, adjacent]), [0, 2, 1])
            x = tl.reshape(x, [turns * adjacent, THREADS])
            bit = tl.full([turns * adjacent], 1, tl.int32) << tl.arange(0, turns * adjacent)
            bits = tl.sum(tl.where(x >= floor, bit[:, None], 0), 0).to(tl.uint32)
            of_threads = _ones(bits)
            to = found_ids + many + tl.cumsum(of_threads, 0) - of_threads
            for turn in range(tl.max(of_threads, 0)):
                rest = bits & (bits - 1)
                # The place of the last 1, as the exponent of a float
                nth = ((bits ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
                id = first * v.GROUP + (nth // adjacent * THREADS + thread) * adjacent + nth % adjacent
                tl.store(to + turn, id.to(tl.float32, bitcast=True), mask=bits != 0)
                bits = rest
            many += tl.sum(of_threads, 0)
    reach = tl.full([], v.LOWEST, tl.int64)
    key = tl.full([], v.LOWEST, tl.int64)
    if many > 0:
        tl.debug_barrier()
        own = listed + row * 2 * room
        if CHOOSES:
            own += start_of_part
        else:
            own += tl.atomic_add(counts + row, many)
        peak, temperature = tl.load(bounds + row * 2 + 1), v.temperature_of(floats, integers, slot)
        seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
        min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
        reached_here = tl.full([THREADS], v.LOWEST, tl.int64)
        keys_here = tl.full([THREADS], v.LOWEST, tl.int64)
        for start in range(0, many, THREADS):
            at, there = start + thread, start + thread < many
            id = tl.load(found_ids + at, mask=there, other=0.0).to(tl.int32, bitcast=True)
            x = tl.load(logits + row * stride + id, mask=there, other=float("-inf")).to(tl.float32)
            x = v.adjusted(
                x, id, there, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
            )
            keys = v.key_of(x, id)
            tl.store(own + at, keys, mask=there)
            if CHOOSES:
                scores = v.score(x, peak, temperature)
                noisy = scores + noise.gumbel(id, position, seed, noise.TOKENS, FAST)
                noisy = tl.where(there & (tl.exp(scores) >= min_p), noisy, float("-inf"))
                # Each thread puts it where it found the id
                tl.store(found_ids + at, noisy, mask=there)
                noisy_keys = v.key_of(noisy, id)
                keys_here = tl.where(noisy_keys > reached_here, keys, keys_here)
                reached_here = tl.maximum(reached_here, noisy_keys)
        if CHOOSES:
            reach, key = v.foremost(reached_here, keys_here)
    if CHOOSES:
        at = row * parts + part
        tl.store(part_counts + at, many)
        tl.store(reached + at, reach)
        tl.store(best_keys + at, key)
