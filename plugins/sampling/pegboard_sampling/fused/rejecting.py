"""Rejection sampling of drafts, as `pegboard_sampling.rejection` defines it, after the rows' own choices were made:
`refuse_drafts` judges, and where a draft is refused each program finds the best of a chunk's residual, max(p - q, 0)
with noise of its own; `replace_refused` puts the chunks together.

Bytes: logits and draft distribution of the choices whose draft is refused, once."""

from __future__ import annotations

import triton
import triton.language as tl

from . import chunks, noise
from . import values as v


@triton.jit
def _probability(x, ids, peak, temperature, last, min_p, mass):
    """Of adjusted logits x under the distribution that the choice was made from."""
    scores = v.score(x, peak, temperature)
    weights = tl.exp(scores)
    return tl.where((v.key_of(x, ids) >= last) & (weights >= min_p), weights / mass, 0.0)


@triton.jit
def judged(drafts, chosen, row, kind):
    """Whether rejection decides: greedy rows have no noise, failed ones no distribution."""
    return (tl.load(drafts + row) >= 0) & (kind != v.GREEDY) & (tl.load(chosen + row) >= 0)


@triton.jit(do_not_specialize=["chunk_count"])
def refuse_drafts(
    logits,
    slots,
    positions,
    floats,
    integers,
    words,
    biases,
    queries,
    places,
    drafts,
    probs,
    chosen,
    statistics,
    chunk_ids,
    support,
    mass,
    stride,
    probs_stride,
    vocab,
    chunk_count,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    PROBS: tl.constexpr,
    FAST: tl.constexpr,
):
    """NOISY and PICK of each chunk become those of the residual, or of the draft alone where it is accepted.
    probs [T, V]: row t + 1 is what the draft after query t was drawn from; without PROBS it was drawn for sure."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    if judged(drafts, chosen, row, v.integer(integers, slot, v.KIND)):
        draft = tl.load(drafts + row).to(tl.int32)
        temperature = v.temperature_of(floats, integers, slot)
        _, peak, _, _ = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
        last, total = tl.load(support + row), tl.load(mass + row)
        min_p = v.number(floats, slot, v.MIN_P).to(tl.float32)
        seed, position = v.integer(integers, slot, v.SEED), tl.load(positions + row)
        drawn_from = probs + (row + 1) * probs_stride
        its = tl.load(logits + row * stride + draft).to(tl.float32)
        its = v.adjusted(
            its, draft, True, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
        )
        likely = 1.0
        if PROBS:
            likely = tl.load(drawn_from + draft).to(tl.float32)
        best = tl.full([], float("-inf"), tl.float32)
        pick = draft
        there = _probability(its, draft, peak, temperature, last, min_p, total)
        if noise.uniform(position, seed) * likely >= there:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            real = ids < vocab
            x = tl.load(logits + row * stride + ids, mask=real, other=float("-inf")).to(tl.float32)
            x = v.adjusted(
                x, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
            )
            left = _probability(x, ids, peak, temperature, last, min_p, total)
            if PROBS:
                left -= tl.load(drawn_from + ids, mask=real, other=0.0).to(tl.float32)
            else:
                left = tl.where(ids == draft, 0.0, left)
            noisy = tl.log(left) + noise.gumbel(ids, position, seed, noise.RESIDUAL, FAST)
            best, pick = v.first_of_best(tl.where(left > 0, noisy, float("-inf")), ids)
        tl.store(statistics + (row * v.STATISTICS + v.NOISY) * chunk_count + chunk, best)
        tl.store(chunk_ids + (row * v.IDS + v.PICK) * chunk_count + chunk, pick)


@triton.jit(do_not_specialize=["chunk_count"])
def replace_refused(slots, integers, drafts, statistics, chunk_ids, chosen, chunk_count, CHUNKS: tl.constexpr):
    """chosen [T]: the draft where it was accepted, or where p and q are so alike that nothing is left of p."""
    row = tl.program_id(0).to(tl.int64)
    if judged(drafts, chosen, row, v.integer(integers, tl.load(slots + row), v.KIND)):
        chunk = tl.arange(0, CHUNKS)
        there = chunk < chunk_count
        noisy = statistics + (row * v.STATISTICS + v.NOISY) * chunk_count + chunk
        picks = chunk_ids + (row * v.IDS + v.PICK) * chunk_count + chunk
        best, pick = v.first_of_best(
            tl.load(noisy, mask=there, other=float("-inf")), tl.load(picks, mask=there, other=0x7FFFFFFF)
        )
        tl.store(chosen + row, tl.where(best == float("-inf"), tl.load(drafts + row), pick.to(tl.int64)))
