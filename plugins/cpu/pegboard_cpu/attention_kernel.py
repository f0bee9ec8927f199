"""Attention of few queries a row over paged K/V, float32, read where they lie.

A unit of work is one query token at one KV head, with the G = H / K query heads that share it. It walks over the
entries in blocks: scores as products of register tiles, softmax with a running maximum (Milakov and Gimelshein 2018),
weighted sum of V. Letters: T query tokens, R rows, H query heads, K KV heads, D head size, S page size.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy
from numba import carray, cfunc, njit

from .functions import exp
from .vectors import FAST, HEAD_STEP, ROWS, SCORES, floats, ints, mixing_tile, products_tile, thread_number

#: Entries whose scores are computed before the running maximum is looked at. A multiple of SCORES.
BLOCK: Final = 128
_scores_four = products_tile(SCORES, 4, ahead=0)
_scores_one = products_tile(SCORES, 1, ahead=0)
_mix_four = mixing_tile(4, 2)
_mix_one = mixing_tile(1, 2)

#: threads, R, K, G, D, S; q, out; cache of k, of v; query_start, kv_len; page_table, step of its rows; window (0:
#: none), sinks (0: none), scratch, numbers of it a thread; scale, softcap (0: none)
LAYOUT: Final = "18q2d"
_COUNT: Final = 20


def scratch_numbers(group: int, head_size: int) -> int:
    """float32 numbers of scratch that a thread needs: scaled queries, scores, and two numbers a query head."""
    return group * (head_size + BLOCK + 2)


@njit
def _score(q: int, group: int, size: int, k: int, k_step: int, count: int, scores: int) -> None:
    """scores[g, :count] of consecutive entries; the last tile may go on to SCORES - 1 more."""
    for e in range(0, count, SCORES):
        place, entry, g = scores + 4 * e, k + e * k_step, 0
        while g + ROWS <= group:
            _scores_four(q + 4 * g * size, 4 * size, entry, k_step, size, place + 4 * g * BLOCK, 4 * BLOCK)
            g += ROWS
        while g < group:
            _scores_one(q + 4 * g * size, 4 * size, entry, k_step, size, place + 4 * g * BLOCK, 4 * BLOCK)
            g += 1


@njit
def _mix(p: int, group: int, size: int, v: int, v_step: int, count: int, out: int) -> None:
    """out[g] += p[g, :count] V"""
    for d in range(0, 4 * size, 4 * HEAD_STEP):
        g = 0
        while g + ROWS <= group:
            _mix_four(p + 4 * g * BLOCK, 4 * BLOCK, v + d, v_step, count, out + 4 * g * size + d, 4 * size)
            g += ROWS
        while g < group:
            _mix_one(p + 4 * g * BLOCK, 4 * BLOCK, v + d, v_step, count, out + 4 * g * size + d, 4 * size)
            g += 1


@njit(fastmath=FAST)
def _weigh(scores: Any, softcap: Any, peak: Any) -> Any:
    """Capped scores; the greatest of them and `peak`."""
    if softcap > 0:
        for e in range(scores.shape[0]):
            scores[e] = softcap * (numpy.float32(1) - numpy.float32(2) / (exp(numpy.float32(2) * scores[e] / softcap) + numpy.float32(1)))
    for e in range(scores.shape[0]):
        peak = max(peak, scores[e])
    return peak


@njit(fastmath=FAST)
def _exponentials(scores: Any, peak: Any) -> Any:
    """exp(scores - peak) in place; their sum."""
    total = numpy.float32(0)
    for e in range(scores.shape[0]):
        scores[e] = exp(scores[e] - peak)
        total += scores[e]
    return total


@njit(fastmath=FAST)
def _scale(x: Any, factor: Any) -> None:
    for i in range(x.shape[0]):
        x[i] *= factor


@njit
def _attend(
    q: int, out: int, group: int, size: int, k: int, v: int, step: int, pages: Any, page_size: int,
    first: int, end: int, softcap: Any, sinks: Any, scratch: int,
) -> None:
    """One unit over entries first .. end - 1; q is scaled; k and v are the addresses of page 0's first entry at this
    head, `step` the bytes from entry to entry."""
    scores, state = scratch, floats(scratch + 4 * group * BLOCK, 2 * group)
    for g in range(group):
        state[2 * g], state[2 * g + 1] = -numpy.inf, 0
    start = first - first % SCORES
    while start < end:
        stop = min(start + BLOCK, end)
        at = start
        while at < stop:
            count = min(page_size - at % page_size, stop - at)
            entry = k + (numpy.int64(pages[at // page_size]) * page_size + at % page_size) * step
            _score(q, group, size, entry, step, count, scores + 4 * (at - start))
            at += count
        begin = max(start, first)
        for g in range(group):
            row = floats(scores + 4 * (g * BLOCK + begin - start), stop - begin)
            peak = _weigh(row, softcap, state[2 * g])
            total = _exponentials(row, peak)
            kept = exp(state[2 * g] - peak)
            state[2 * g], state[2 * g + 1] = peak, state[2 * g + 1] * kept + total
            _scale(floats(out + 4 * g * size, size), kept)
        at = begin
        while at < stop:
            count = min(page_size - at % page_size, stop - at)
            entry = v + (numpy.int64(pages[at // page_size]) * page_size + at % page_size) * step
            _mix(scores + 4 * (at - start), group, size, entry, step, count, out)
            at += count
        start = stop
    for g in range(group):
        factor = numpy.float32(1)
        total = state[2 * g + 1]
        if sinks.shape[0] > 0:
            peak = max(state[2 * g], sinks[g])
            factor = exp(state[2 * g] - peak)
            total = total * factor + exp(sinks[g] - peak)
        _scale(floats(out + 4 * g * size, size), factor / total)


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def attend(call: Any) -> None:
    a, real = carray(call, (_COUNT,), numpy.int64), carray(call, (_COUNT,), numpy.float64)
    threads, rows, kv_heads, group, size, page_size = a[0], a[1], a[2], a[3], a[4], a[5]
    q, out, k, v, table, table_step, window, sinks = a[6], a[7], a[8], a[9], a[12], a[13], a[14], a[15]
    query_start, kv_len = ints(a[10], rows + 1), ints(a[11], rows)
    scale, softcap = numpy.float32(real[18]), numpy.float32(real[19])
    thread, unit, step = numpy.int64(thread_number()), 0, 4 * kv_heads * size
    scratch = a[16] + 4 * thread * a[17]
    queries = scratch + 4 * group * (BLOCK + 2)
    for row in range(rows):
        tokens, length = numpy.int64(query_start[row + 1] - query_start[row]), numpy.int64(kv_len[row])
        pages = ints(table + row * table_step, (length + page_size - 1) // page_size)
        for query in range(tokens):
            end = length - tokens + query + 1
            first = max(end - window, 0) if window > 0 else 0
            for head in range(kv_heads):
                unit += 1
                if unit % threads != thread:
                    continue
                place = 4 * ((query_start[row] + query) * kv_heads + head) * group * size
                mixed = floats(out + place, group * size)
                mixed[:] = 0
                if end <= first or length == 0:
                    continue
                raw, scaled = floats(q + place, group * size), floats(queries, group * size)
                for i in range(group * size):
                    scaled[i] = raw[i] * scale
                own_sinks = floats(sinks + 4 * head * group, group if sinks != 0 else 0)
                shift = 4 * head * size
                _attend(queries, out + place, group, size, k + shift, v + shift, step, pages, page_size, first, end, softcap, own_sinks, scratch)
