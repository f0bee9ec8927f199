"""Log-probabilities of the chosen and of the most probable tokens of rows that ask for them, one program a row."""

from __future__ import annotations

import triton
import triton.language as tl

from . import best, choosing, chunks
from . import values as v


@triton.jit(do_not_specialize=["groups", "chunk_count", "width"])
def list_logprobs(
    logits,
    slots,
    floats,
    integers,
    words,
    biases,
    queries,
    places,
    maxima,
    raw_maxima,
    statistics,
    scratch,
    ids,
    support,
    mass,
    chosen_out,
    top_ids,
    top_values,
    stride,
    vocab,
    groups,
    chunk_count,
    width,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    RAW: tl.constexpr,
    PROCESSED: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """chosen_out [N], top_ids and top_values [N, width]: NaN and -1 where nothing was asked for."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    asked = v.integer(integers, slot, v.LOGPROBS)
    count = tl.minimum(asked, width).to(tl.int32)
    chosen = tl.load(ids + row)
    processed = (v.integer(integers, slot, v.FLAGS) & v.PROCESSED) != 0
    own, nan = logits + row * stride, float("nan")
    of_chosen = tl.full([], nan, tl.float32)
    values = tl.full([best.AT_ONCE], nan, tl.float32)
    listed = scratch + row * best.SCRATCH
    many = tl.full([], 0, tl.int32)
    token = tl.maximum(chosen, 0).to(tl.int32)
    if RAW:
        if (asked >= 0) & (processed == 0):
            _, peak, _, total = chunks.whole_row(statistics, row, chunk_count, 1.0, CHUNKS, v.RAW_MAXIMUM, v.RAW_SUM)
            scale = tl.log(total)
            x = tl.load(own + token).to(tl.float32)
            of_chosen = v.score(x, peak, 1.0) - scale
            if count > 0:
                many = best.best_tokens(
                    own,
                    raw_maxima + row * groups,
                    listed,
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
                    v.NO_WORDS,
                    False,
                )
            values = v.score(v.value_of(best.listed(listed, many)), peak, 1.0) - scale
    if PROCESSED:
        if (asked >= 0) & processed:
            temperature = v.temperature_of(floats, integers, slot)
            _, peak, _, _ = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
            scale = tl.log(tl.load(mass + row))
            last = tl.load(support + row)
            x = tl.load(own + token).to(tl.float32)
            x = v.adjusted(
                x, token, True, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
            )
            of_chosen = v.score(x, peak, temperature) - scale
            if count > 0:
                many = best.best_tokens(
                    own,
                    maxima + row * groups,
                    listed,
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
            keys = best.listed(listed, many)
            scores = v.score(v.value_of(keys), peak, temperature)
            kept = keys >= last
            if v.integer(integers, slot, v.KIND) != v.GREEDY:
                kept = kept & (tl.exp(scores) >= v.number(floats, slot, v.MIN_P).to(tl.float32))
            values = tl.where(kept, scores - scale, float("-inf"))
    tl.store(chosen_out + row, tl.where(chosen < 0, nan, of_chosen))
    keys = best.listed(listed, many)
    place, _ = best.places(listed, many, keys, 0.0, 1.0, best.BLOCK)
    at = row * width + place
    tl.store(top_ids + at, v.id_of(keys).to(tl.int64), mask=place < count)
    tl.store(top_values + at, values, mask=place < count)
    rest = tl.arange(0, best.MOST)
    nothing = (rest >= count) & (rest < width)
    tl.store(top_ids + row * width + rest, tl.full([best.MOST], -1, tl.int64), mask=nothing)
    tl.store(top_values + row * width + rest, tl.full([best.MOST], nan, tl.float32), mask=nothing)
    if COUNTS:
        choosing.count_choice(chosen, slot, integers, words, vocab, WORDS)


@triton.jit(do_not_specialize=["chunk_count"])
def spread_logprobs(
    logits,
    slots,
    floats,
    integers,
    words,
    biases,
    queries,
    places,
    statistics,
    support,
    mass,
    spread,
    stride,
    vocab,
    chunk_count,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    RAW: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    """spread [N, V] float32: of every token, for rows that ask; for those that want more than can be listed."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    asks = v.integer(integers, slot, v.LOGPROBS) >= 0
    processed = (v.integer(integers, slot, v.FLAGS) & v.PROCESSED) != 0
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    real = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=real & asks, other=float("-inf")).to(tl.float32)
    values = tl.full([CHUNK], float("nan"), tl.float32)
    if RAW:
        if asks & (processed == 0):
            _, peak, _, total = chunks.whole_row(statistics, row, chunk_count, 1.0, CHUNKS, v.RAW_MAXIMUM, v.RAW_SUM)
            values = v.score(x, peak, 1.0) - tl.log(total)
    if PROCESSED:
        if asks & processed:
            temperature = v.temperature_of(floats, integers, slot)
            _, peak, _, _ = chunks.whole_row(statistics, row, chunk_count, temperature, CHUNKS, v.MAXIMUM, v.SUM)
            x = v.adjusted(
                x, ids, real, slot, row, floats, integers, words, biases, queries, places, vocab, WORDS, BIASES
            )
            scores = v.score(x, peak, temperature)
            kept = v.key_of(x, ids) >= tl.load(support + row)
            if v.integer(integers, slot, v.KIND) != v.GREEDY:
                kept = kept & (tl.exp(scores) >= v.number(floats, slot, v.MIN_P).to(tl.float32))
            values = tl.where(kept, scores - tl.log(tl.load(mass + row)), float("-inf"))
    tl.store(spread + row * vocab + ids, values, mask=real)
