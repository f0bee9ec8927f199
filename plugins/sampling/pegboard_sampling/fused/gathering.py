"""Rows whose choice may be among many tokens: top-p without top-k, min-p alone, top-k beyond 64.

`bound_candidates` finds a logit that none of them lies below, from what the pass over the logits left: one program a
row. `gather_candidates` reads what reaches it again and lists the tokens that do, in any order: one program a part of
the row, one turn a tile. Where no tokens are counted it also adds their noise, and says which is a part's best.

Bytes: the groups that reach the bound, and 8 written for each token that does. Limit: bandwidth; with many candidates
the noise's arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from . import best, chunks, noise
from . import values as v
from .chunks import COLUMNS

#: Halvings of the range of logits that matters.
_HALVINGS = tl.constexpr(8)
_LEAST_FINITE = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _kth_maximum(maxima, groups, count, GROUPS: tl.constexpr):
    """What `count` or some more of a row's group maxima reach; -inf where there are fewer groups."""
    group = tl.arange(0, GROUPS)
    top = tl.load(maxima + group, mask=group < groups, other=float("-inf"))
    keys = tl.where(group < groups, (v.ordered(top).to(tl.int64) << 32) | group.to(tl.int64), v.LOWEST)
    found = tl.full([], float("-inf"), tl.float32)
    if count <= groups:
        found = v.value_of(best.bound(keys, groups, count, count + (count >> 2)))
    return found


@triton.jit
def _least_score(floats, slot, total, vocab):
    """Tokens below this together are too light to matter to top-p, or each of them to min-p."""
    top_p = v.number(floats, slot, v.TOP_P)
    least = tl.log(v.number(floats, slot, v.MIN_P).to(tl.float32))
    if top_p < 1:
        least = tl.maximum(least, tl.log(((1 - top_p) * (total / vocab).to(tl.float64)).to(tl.float32)))
    return least - 1e-3


@triton.jit
def _reached_by(profiles, row, chunk_count, beside, wanted, bottom, top, CHUNKS: tl.constexpr):
    """A logit in bottom .. top so that what reaches it surely weighs `wanted`, by the profiles of a row's chunks."""
    chunk, column = tl.arange(0, CHUNKS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = profiles + (row * chunk_count + chunk) * 2 * COLUMNS + column
    limits = tl.load(at, mask=chunk < chunk_count, other=float("-inf"))
    masses = tl.load(at + COLUMNS, mask=chunk < chunk_count, other=0.0)
    # What outweighs nothing has no place beside the peak; a NaN row is nobody's, but must not be compared
    masses = tl.where((beside > float("-inf"))[:, None] & (masses == masses), masses * tl.exp(beside)[:, None], 0.0)
    for _ in range(_HALVINGS):
        middle = 0.5 * bottom + 0.5 * top
        # A chunk weighs no less above some logit than above its next limit up
        least = tl.max(tl.where(limits >= middle, masses, 0.0), 1)
        # Sums of float32, so with a margin: whoever chooses weighs exactly
        enough = tl.sum(least, 0).to(tl.float64) >= wanted * 1.0001
        bottom = tl.where(enough, middle, bottom)
        top = tl.where(enough, top, middle)
    return bottom


@triton.jit(do_not_specialize=["groups", "chunk_count"])
def bound_candidates(
    slots,
    floats,
    integers,
    maxima,
    statistics,
    profiles,
    bounds,
    vocab,
    groups,
    chunk_count,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """bounds [N, 2] float32: a logit that takes part is not below the first, which is finite, +inf or in rows that
    choose in another way NaN; the second is the greatest."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if v.integer(integers, slot, v.KIND) == v.WIDE:
        temperature = v.temperature_of(floats, integers, slot)
        _, peak, beside, total = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
        count, top_p = v.integer(integers, slot, v.TOP_K), v.number(floats, slot, v.TOP_P)
        if count > 0:
            floor = _kth_maximum(maxima + row * groups, groups, count.to(tl.int32), GROUPS)
        else:
            floor = peak + temperature * _least_score(floats, slot, total, vocab)
            if top_p < 1:
                wanted = top_p * total.to(tl.float64)
                floor = _reached_by(profiles, row, chunk_count, beside, wanted, floor, peak, CHUNKS)
        tl.store(bounds + row * 2, tl.maximum(floor, _LEAST_FINITE))
        tl.store(bounds + row * 2 + 1, peak)
    else:
        tl.store(bounds + row * 2, float("nan"))


@triton.jit
def _one(x, turn, nth):
    """x[turn, :, nth] of integers: a register of each thread's, as it holds its own turns and neighbours all."""
    at_turn = (tl.arange(0, x.shape[0]) == turn)[:, None, None]
    at_nth = (tl.arange(0, x.shape[2]) == nth)[None, None, :]
    return tl.sum(tl.sum(tl.where(at_turn & at_nth, x, 0), 2), 0)


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
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    floor = tl.load(bounds + row * 2)
    slot = tl.load(slots + row)
    own = listed + row * 2 * room
    if CHOOSES:
        own += part * TILES * TILE_GROUPS * v.GROUP
    many = tl.full([], 0, tl.int32)
    for tile in range(TILES):
        first = (part * TILES + tile) * TILE_GROUPS
        group = first + tl.arange(0, TILE_GROUPS)
        top = tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf"))
        if tl.max((top >= floor).to(tl.int32), 0) > 0:
            ids = group[:, None] * v.GROUP + tl.arange(0, v.GROUP)[None, :]
            real = ids < vocab
            x = tl.load(logits + row * stride + ids, mask=real, other=float("-inf")).to(tl.float32)
            x = v.adjusted(
                x, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
            )
            # Turns, threads and adjacent tokens: places are sums within threads, which meet only once
            adjacent: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
            turns: tl.constexpr = TILE_GROUPS * v.GROUP // (THREADS * adjacent)
            x = tl.reshape(x, [turns, THREADS, adjacent])
            ids = tl.reshape(ids, [turns, THREADS, adjacent])
            taken = (x >= floor).to(tl.int32)
            of_threads = tl.sum(tl.sum(taken, 2), 0)
            found = tl.sum(of_threads, 0)
            if CHOOSES:
                to = own + many
            else:
                to = own + tl.atomic_add(counts + row, found)
            place = tl.cumsum(of_threads, 0) - of_threads
            keys = v.key_of(x, ids)
            for turn in tl.static_range(turns):
                for nth in tl.static_range(adjacent):
                    one_taken = _one(taken, turn, nth)
                    tl.store(to + place, _one(keys, turn, nth), mask=one_taken > 0)
                    place += one_taken
            many += found
    if CHOOSES:
        reach = tl.full([], v.LOWEST, tl.int64)
        key = tl.full([], v.LOWEST, tl.int64)
        if many > 0:
            tl.debug_barrier()
            peak, temperature = tl.load(bounds + row * 2 + 1), v.temperature_of(floats, integers, slot)
            seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
            min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
            offsets = tl.arange(0, THREADS)
            reaches = tl.full([THREADS], v.LOWEST, tl.int64)
            firsts = tl.full([THREADS], v.LOWEST, tl.int64)
            beside = noises + row * 4 * room + 2 * room + part * TILES * TILE_GROUPS * v.GROUP
            for start in range(0, many, THREADS):
                there = start + offsets < many
                candidates = tl.load(own + start + offsets, mask=there, other=v.LOWEST)
                scores = v.score(v.value_of(candidates), peak, temperature)
                noisy = scores + noise.gumbel(v.id_of(candidates), position, seed, noise.TOKENS, FAST)
                noisy = tl.where(there & (tl.exp(scores) >= min_p), noisy, float("-inf"))
                tl.store(beside + start + offsets, noisy, mask=there)
                noisy_keys = v.key_of(noisy, v.id_of(candidates))
                firsts = tl.where(noisy_keys > reaches, candidates, firsts)
                reaches = tl.maximum(reaches, noisy_keys)
            reach, key = v.foremost(reaches, firsts)
        at = row * parts + part
        tl.store(part_counts + at, many)
        tl.store(reached + at, reach)
        tl.store(best_keys + at, key)
