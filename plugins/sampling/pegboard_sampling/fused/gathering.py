"""Lists the candidates of rows whose choice may be among many tokens: top-p without top-k, min-p alone, top-k beyond
64.

Of the groups that reach the row's bound (`bounding`) the logits are read again, and the tokens that do are listed in
any order: one program a part of the row, one turn a tile. Where no tokens are counted it also adds their noise, and
says which is a part's best. Programs are single warps, so that nothing in them waits for others, and many share a
multiprocessor.

Bytes: the groups that reach the bound, and 8 written for each token that does (12 with its noise). Limit: bandwidth;
with many candidates the noise's arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from . import noise
from . import values as v


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
    least = v.ordered(floor)
    slot = tl.load(slots + row)
    own = listed + row * 2 * room
    if CHOOSES:
        own += part * TILES * TILE_GROUPS * v.GROUP
        # What the noise takes, so that its loads don't come after the logits'
        peak, temperature = tl.load(bounds + row * 2 + 1), v.temperature_of(floats, integers, slot)
        seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
        min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
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
            # What each thread holds: places are sums within threads, which meet only once
            adjacent: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
            turns: tl.constexpr = TILE_GROUPS * v.GROUP // (THREADS * adjacent)
            x = tl.permute(tl.reshape(v.ordered(x), [turns, THREADS, adjacent]), [0, 2, 1])
            x = tl.reshape(x, [turns * adjacent, THREADS])
            of_threads = tl.sum((x >= least).to(tl.int32), 0)
            found = tl.sum(of_threads, 0)
            if CHOOSES:
                to = own + many
            else:
                to = own + tl.atomic_add(counts + row, found)
            to += tl.cumsum(of_threads, 0) - of_threads
            held = tl.arange(0, turns * adjacent)[:, None]
            after = 0x7FFFFFFF - first * v.GROUP - tl.arange(0, THREADS) * adjacent
            for turn in tl.static_range(turns):
                for nth in tl.static_range(adjacent):
                    # A register of each thread's
                    one = tl.sum(tl.where(held == turn * adjacent + nth, x, 0), 0)
                    taken = one >= least
                    # As v.key_of
                    key = (one.to(tl.int64) << 32) | (after - (turn * THREADS * adjacent + nth)).to(tl.int64)
                    tl.store(to, key, mask=taken)
                    to += taken.to(tl.int32)
            many += found
    if CHOOSES:
        reach = tl.full([], v.LOWEST, tl.int64)
        key = tl.full([], v.LOWEST, tl.int64)
        if many > 0:
            tl.debug_barrier()
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
