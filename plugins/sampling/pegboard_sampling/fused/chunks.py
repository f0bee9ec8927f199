"""The pass over the logits: each program reads a chunk of a row once and leaves what the choice needs of it.

Bytes: the logits, and 4 for each group of 128 of them. Limit: the memory's bandwidth; for rows that only add noise the
arithmetic of the noise; for top-p alone, which asks of each token how far below the best it is, that arithmetic too."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from . import noise
from . import values as v

#: More than what float32 adds to or takes from a bound of a perturbed score near the best.
_ROUNDING = tl.constexpr(1e-4)
#: A chunk's tokens are weighed down to these depths: scores below the chunk's greatest. What they weigh there is
#: exp(-depth), which saves the pass holding the logits beside the weights; so limits are known but for a slack.
_DEPTHS = tl.constexpr((4.0, 5.0, 6.0, 7.0))
_LEAST_WEIGHTS = tl.constexpr(tuple(math.exp(-depth) for depth in _DEPTHS.value))
_SLACK, _ULPS = tl.constexpr(1e-3), tl.constexpr(2.0**-21)
#: Columns of a profile, one of each depth.
COLUMNS = tl.constexpr(4)


@triton.jit
def _relative(x, peak, temperature):
    """v.score for a bound: no choices, but where something is infinite."""
    if (peak == float("inf")) | (peak == float("-inf")):
        x = tl.where((x == peak) & (x > 0), 0.0, float("-inf"))
        peak = 0.0
    return (x - peak) * v.inverse(temperature)


@triton.jit
def _weights(x, peak, temperature, FAST: tl.constexpr):
    """exp(v.score) for sums."""
    if (peak == float("inf")) | (peak == float("-inf")):
        x = tl.where((x == peak) & (x > 0), 0.0, float("-inf"))
        peak = 0.0
    return v.exp_of_product(x - peak, v.inverse(temperature), FAST)


@triton.jit
def _sums_of_threads(x, THREADS: tl.constexpr, ADJACENT: tl.constexpr):
    """[THREADS]: what each thread adds up of a tile that they read in turns, ADJACENT tokens each."""
    turns = tl.reshape(x, [x.numel // (THREADS * ADJACENT), THREADS, ADJACENT])
    return tl.sum(tl.sum(turns, 2), 0)


@triton.jit
def slack(x, temperature):
    """More than rounding takes from or adds to a logit x for which a score stands."""
    return temperature * _SLACK + tl.abs(x) * _ULPS


@triton.jit
def _profile(weights, greatest, temperature, THREADS: tl.constexpr, ADJACENT: tl.constexpr):
    """Float32 [COLUMNS], twice: logits, and what the tokens weigh that reach them; what lies less than `slack` below
    may be among them."""
    column = tl.arange(0, COLUMNS)
    limits = tl.zeros([COLUMNS], tl.float32)
    masses = tl.zeros([COLUMNS, THREADS], tl.float32)
    for at in tl.static_range(COLUMNS):
        limits = tl.where(column == at, greatest - temperature * _DEPTHS[at], limits)
        heavy = _sums_of_threads(weights * (weights >= _LEAST_WEIGHTS[at]).to(tl.float32), THREADS, ADJACENT)
        # Threads meet only once, for all columns
        masses = tl.where((column == at)[:, None], heavy[None, :], masses)
    return limits, tl.sum(masses, 1)


@triton.jit(do_not_specialize=["groups", "chunks"])
def read_chunks(
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
    raw_maxima,
    statistics,
    chunk_ids,
    counts,
    profiles,
    stride,
    vocab,
    groups,
    chunks,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    ADDS_NOISE: tl.constexpr,
    KEEPS_GROUPS: tl.constexpr,
    SUMS: tl.constexpr,
    PROFILES: tl.constexpr,
    REJECTS: tl.constexpr,
    RAW: tl.constexpr,
    FAST: tl.constexpr,
    THREADS: tl.constexpr,
):
    """maxima [N, groups], statistics [N, STATISTICS, chunks], chunk_ids [N, IDS, chunks]; counts [N] become 0. For
    top-p alone profiles [N, chunks, 2, COLUMNS]."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    kind = v.integer(integers, slot, v.KIND)
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * v.GROUP + tl.arange(0, v.GROUP)[None, :]
    real = ids < vocab
    raw = tl.load(logits + row * stride + ids, mask=real, other=float("-inf")).to(tl.float32)
    x = v.adjusted(raw, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES)
    broken = tl.max(tl.ravel(((raw != raw) | (x != x)).to(tl.int32)), 0)
    if KEEPS_GROUPS:
        of_groups = tl.max(x, 1)
        greatest = tl.max(of_groups, 0)
        tl.store(maxima + row * groups + group, of_groups, mask=group < groups)
        if chunk == 0:
            tl.store(counts + row, 0)
    else:
        greatest = tl.max(tl.ravel(x), 0)
    at = statistics + row * v.STATISTICS * chunks + chunk
    ids_at = chunk_ids + row * v.IDS * chunks + chunk
    tl.store(at + v.MAXIMUM * chunks, greatest)
    first = tl.full([], 0, tl.int32)
    if kind == v.GREEDY:
        first = tl.min(tl.ravel(tl.where(x == greatest, ids, 0x7FFFFFFF)), 0)
    tl.store(ids_at + v.FIRST * chunks, tl.where(broken != 0, -1, first))
    if SUMS:
        sums = (kind == v.WIDE) | ((v.integer(integers, slot, v.FLAGS) & v.PROCESSED) != 0)
        if REJECTS:
            sums |= kind == v.NOISE
        if sums:
            temperature = v.temperature_of(floats, integers, slot)
            weights = _weights(x, greatest, temperature, FAST)
            tl.store(at + v.SUM * chunks, tl.sum(tl.ravel(weights), 0))
            if PROFILES:
                if v.alone(floats, integers, slot):
                    adjacent: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
                    limits, masses = _profile(weights, greatest, temperature, THREADS, adjacent)
                    profile = profiles + (row * chunks + chunk) * 2 * COLUMNS + tl.arange(0, COLUMNS)
                    tl.store(profile, limits)
                    tl.store(profile + COLUMNS, masses)
    if ADDS_NOISE:
        if kind == v.NOISE:
            temperature = v.temperature_of(floats, integers, slot)
            seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
            # What a token can reach; its noise itself is computed only of those that may be the best
            reach = _relative(x, greatest, temperature) + noise.bound(ids, position, seed, FAST)
            most = tl.max(tl.ravel(reach), 0)
            best = tl.full([], float("-inf"), tl.float32)
            pick = tl.full([], 0x7FFFFFFF, tl.int32)
            while most > best - _ROUNDING:
                id = tl.min(tl.ravel(tl.where(reach == most, ids, 0x7FFFFFFF)), 0)
                y = tl.load(logits + row * stride + id).to(tl.float32)
                y = v.adjusted(
                    y, id, True, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
                )
                noisy = v.score(y, greatest, temperature) + noise.gumbel(id, position, seed, noise.TOKENS, FAST)
                pick = tl.where((noisy > best) | ((noisy == best) & (id < pick)), id, pick)
                best = tl.maximum(best, noisy)
                reach = tl.where(ids == id, float("-inf"), reach)
                most = tl.max(tl.ravel(reach), 0)
            tl.store(at + v.NOISY * chunks, best)
            tl.store(ids_at + v.PICK * chunks, pick)
    if RAW:
        if v.integer(integers, slot, v.LOGPROBS) >= 0:
            greatest = tl.max(tl.ravel(raw), 0)
            tl.store(raw_maxima + row * groups + group, tl.max(raw, 1), mask=group < groups)
            tl.store(at + v.RAW_MAXIMUM * chunks, greatest)
            tl.store(at + v.RAW_SUM * chunks, tl.sum(tl.ravel(v.exp(v.score(raw, greatest, 1.0), FAST)), 0))


@triton.jit
def whole_row(statistics, row, chunks, temperature, CHUNKS: tl.constexpr, MAX: tl.constexpr, TOTAL: tl.constexpr):
    """Of a row's chunks: each one's maximum, their greatest, and each one's score beside it. MAX and TOTAL name the
    statistics; the last result is the row's sum of weights."""
    of_chunks, peak, beside, sums = each_chunk(statistics, row, chunks, temperature, CHUNKS, MAX, TOTAL)
    return of_chunks, peak, beside, tl.sum(sums, 0)


@triton.jit
def each_chunk(statistics, row, chunks, temperature, CHUNKS: tl.constexpr, MAX: tl.constexpr, TOTAL: tl.constexpr):
    """As `whole_row`, but what each chunk weighs."""
    chunk = tl.arange(0, CHUNKS)
    at = statistics + row * v.STATISTICS * chunks + chunk
    of_chunks = tl.load(at + MAX * chunks, mask=chunk < chunks, other=float("-inf"))
    peak = tl.max(of_chunks, 0)
    beside = v.score(of_chunks, peak, temperature)
    sums = tl.load(at + TOTAL * chunks, mask=chunk < chunks, other=0.0)
    return of_chunks, peak, beside, tl.where(beside > float("-inf"), sums * tl.exp(beside), 0.0)
