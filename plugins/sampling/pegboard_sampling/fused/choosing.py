"""The choice: one program a row puts its chunks together, takes the token and counts it."""

from __future__ import annotations

import triton
import triton.language as tl

from . import best, chunks, noise
from . import values as v


@triton.jit
def count_choice(chosen, slot, integers, words, vocab, WORDS: tl.constexpr):
    """The slot's state after the choice; of a failed one (negative) nothing is counted."""
    if chosen >= 0:
        tl.store(integers + slot * v.INTEGERS + v.CHOSEN, v.integer(integers, slot, v.CHOSEN) + 1)
        if WORDS:
            if (v.integer(integers, slot, v.FLAGS) & v.PENALTIES) != 0:
                word = words + slot * vocab + chosen
                tl.store(word, tl.load(word) + v.CHOSEN_ONCE)


@triton.jit(do_not_specialize=["groups", "chunk_count"])
def choose(
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
    statistics,
    chunk_ids,
    scratch,
    ids_out,
    support,
    mass,
    stride,
    vocab,
    groups,
    chunk_count,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    ADDS_NOISE: tl.constexpr,
    FEW: tl.constexpr,
    TELLS: tl.constexpr,
    COUNTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """ids_out [N] int64 holds the choices of WIDE rows already. With TELLS, `support` [N] gets the last key that could
    be chosen and `mass` [N] float32 what the weights of those add up to. COUNTS: the choice is counted."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    kind = v.integer(integers, slot, v.KIND)
    temperature = v.temperature_of(floats, integers, slot)
    of_chunks, peak, beside, total = chunks.whole_row(
        statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM
    )
    chunk = tl.arange(0, CHUNKS)
    at = chunk_ids + row * v.IDS * chunk_count + chunk
    first = tl.load(at + v.FIRST * chunk_count, mask=chunk < chunk_count, other=0)
    chosen = tl.full([], 0, tl.int64)
    last = tl.full([], v.LOWEST, tl.int64)
    if kind == v.GREEDY:
        chosen = tl.min(tl.where(of_chunks == peak, first, 0x7FFFFFFF), 0).to(tl.int64)
    if kind == v.WIDE:
        chosen = tl.load(ids_out + row)
    if ADDS_NOISE:
        if kind == v.NOISE:
            noisy = tl.load(
                statistics + (row * v.STATISTICS + v.NOISY) * chunk_count + chunk,
                mask=chunk < chunk_count,
                other=float("-inf"),
            )
            noisy = tl.where(beside > float("-inf"), noisy + beside, float("-inf"))
            pick = tl.load(at + v.PICK * chunk_count, mask=chunk < chunk_count, other=0x7FFFFFFF)
            chosen = tl.min(tl.where(noisy == tl.max(noisy, 0), pick, 0x7FFFFFFF), 0).to(tl.int64)
    if FEW:
        if kind == v.FEW:
            count = v.integer(integers, slot, v.TOP_K).to(tl.int32)
            own = scratch + row * best.SCRATCH
            many = best.best_tokens(
                logits + row * stride,
                maxima + row * groups,
                own,
                count,
                slot,
                row,
                floats,
                integers,
                words,
                biases,
                queries,
                places,
                vocab,
                groups,
                GROUPS,
                WORDS,
                BIASES,
            )
            keys = best.listed(own, many)
            scores = tl.where(keys == v.LOWEST, float("-inf"), v.score(v.value_of(keys), peak, temperature))
            weights = v.weight(scores)
            place, before = best.places(own, many, keys, peak, temperature, best.BLOCK)
            among = place < count
            top_p = v.number(floats, slot, v.TOP_P)
            all = tl.sum(tl.where(among, weights, 0), 0).to(tl.float64)
            reached = tl.where(top_p < 1, top_p * all, float("inf"))
            kept = among & (before.to(tl.float64) < reached) & (scores > float("-inf"))
            last = tl.min(tl.where(kept, keys, v.HIGHEST), 0)
            kept = kept & (tl.exp(scores) >= v.number(floats, slot, v.MIN_P).to(tl.float32))
            total = tl.sum(tl.where(kept, weights, 0), 0).to(tl.float32) / v.UNIT
            ids = v.id_of(keys)
            seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
            noisy = tl.where(kept, scores + noise.gumbel(ids, position, seed, noise.TOKENS, FAST), float("-inf"))
            _, pick = v.first_of_best(noisy, ids)
            chosen = pick.to(tl.int64)
    if TELLS:
        if kind != v.WIDE:
            tl.store(support + row, last)
            tl.store(mass + row, total)
    chosen = tl.where(peak == float("-inf"), -2, chosen)
    chosen = tl.where(tl.min(first, 0) < 0, -1, chosen)
    tl.store(ids_out + row, chosen)
    if COUNTS:
        count_choice(chosen, slot, integers, words, vocab, WORDS)
