"""Attention of few queries a row over paged K/V, float32, read where they lie.

A unit of work is one query token at one KV head, with the G = H / K query heads that share it. It walks over the
entries in blocks: scores as products of register tiles, softmax with a running maximum, weighted sum of V.
Letters: T query tokens, R rows, H query heads, K KV heads, D head size, S page size.
"""

from __future__ import annotations

from typing import Any, Final

import numpy

from .functions import exp
from .softmax import exponentials, greatest, last_factor, scale
from .tiles import HEAD_STEP, ROWS, SCORES, mixing_tile, products_tile
from .vectors import LINE, fetch, get, get_double, get_int, get_long, inner, kernel, put, team_size, thread_number

#: Entries whose scores are computed before the running maximum is looked at. A multiple of SCORES.
BLOCK: Final = 128
_scores_four = products_tile(SCORES, 4, ahead=0)
_scores_one = products_tile(SCORES, 1, ahead=0)
_mix_four = mixing_tile(4, 2)
_mix_one = mixing_tile(1, 2)

#: R, K, G, D, S; q, out; cache of k, of v; query_start, kv_len; page_table, step of its rows; window (0:
#: none), sinks (0: none), scratch, numbers of it a thread; scale, softcap (0: none)
LAYOUT: Final = "17q2d"


def scratch_numbers(group: int, head_size: int) -> int:
    """float32 numbers of scratch that a thread needs: scaled queries, scores, and two numbers a query head."""
    return group * (head_size + BLOCK + 2)


@inner()
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


@inner()
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


@inner()
def _fetch(entry: int, step: int, count: int, size: int) -> None:
    """Consecutive entries of a page, which lie too far apart for the CPU to guess the next."""
    for e in range(count):
        for line in range(0, 4 * size, LINE):
            fetch(entry + e * step + line)


@inner()
def _attend(
    q: int,
    out: int,
    group: int,
    size: int,
    k: int,
    v: int,
    step: int,
    pages: int,
    page_size: int,
    first: int,
    end: int,
    softcap: Any,
    sinks: int,
    scores: int,
) -> None:
    """One unit over entries first .. end - 1; q is scaled, out is zero; k and v are the addresses of page 0's first
    entry at this head, `step` the bytes from entry to entry."""
    # Running maximum and sum of each query head
    peaks, totals = scores + 4 * group * BLOCK, scores + 4 * group * (BLOCK + 1)
    for g in range(group):
        put(peaks, g, numpy.float32(-numpy.inf))
        put(totals, g, numpy.float32(0))
    start = first - first % SCORES
    while start < end:
        stop = start + BLOCK if start + BLOCK < end else end
        at = start
        while at < stop:
            here, rest = page_size - at % page_size, stop - at
            count = here if here < rest else rest
            place = (get_int(pages, at // page_size) * page_size + at % page_size) * step
            _fetch(v + place, step, count, size)
            after = at + count
            if after < end and after % page_size == 0:
                following = page_size if page_size < BLOCK else BLOCK
                _fetch(k + get_int(pages, after // page_size) * page_size * step, step, following, size)
            _score(q, group, size, k + place, step, count, scores + 4 * (at - start))
            at += count
        begin = start if start > first else first
        for g in range(group):
            row = scores + 4 * (g * BLOCK + begin - start)
            peak = greatest(row, stop - begin, softcap, get(peaks, g))
            total = exponentials(row, stop - begin, peak)
            kept = exp(get(peaks, g) - peak)
            put(peaks, g, peak)
            put(totals, g, get(totals, g) * kept + total)
            scale(out + 4 * g * size, size, kept, out + 4 * g * size)
        at = begin
        while at < stop:
            here, rest = page_size - at % page_size, stop - at
            count = here if here < rest else rest
            place = (get_int(pages, at // page_size) * page_size + at % page_size) * step
            _mix(scores + 4 * (at - start), group, size, v + place, step, count, out)
            at += count
        start = stop
    for g in range(group):
        factor = last_factor(get(peaks, g), get(totals, g), sinks, g)
        scale(out + 4 * g * size, size, factor, out + 4 * g * size)


@kernel
def attend(call: int) -> None:
    rows, kv_heads, group = get_long(call, 0), get_long(call, 1), get_long(call, 2)
    size, page_size, q, out = get_long(call, 3), get_long(call, 4), get_long(call, 5), get_long(call, 6)
    k, v, query_start, kv_len = get_long(call, 7), get_long(call, 8), get_long(call, 9), get_long(call, 10)
    table, table_step, window, sinks = get_long(call, 11), get_long(call, 12), get_long(call, 13), get_long(call, 14)
    factor, softcap = numpy.float32(get_double(call, 17)), numpy.float32(get_double(call, 18))
    threads, thread = numpy.int64(team_size()), numpy.int64(thread_number())
    unit, step = 0, 4 * kv_heads * size
    scratch = get_long(call, 15) + 4 * thread * get_long(call, 16)
    scaled = scratch + 4 * group * (BLOCK + 2)
    for row in range(rows):
        start, length = numpy.int64(get_int(query_start, row)), numpy.int64(get_int(kv_len, row))
        tokens = numpy.int64(get_int(query_start, row + 1)) - start
        for query in range(tokens):
            end = length - tokens + query + 1
            first = end - window if 0 < window < end else 0
            for head in range(kv_heads):
                unit += 1
                if unit % threads != thread:
                    continue
                place = 4 * ((start + query) * kv_heads + head) * group * size
                for i in range(group * size):
                    put(out + place, i, numpy.float32(0))
                if length == 0 or end <= first:
                    continue
                scale(q + place, group * size, factor, scaled)
                own_sinks = sinks + 4 * head * group if sinks != 0 else 0
                shift = 4 * head * size
                _attend(
                    scaled,
                    out + place,
                    group,
                    size,
                    k + shift,
                    v + shift,
                    step,
                    table + row * table_step,
                    page_size,
                    first,
                    end,
                    softcap,
                    own_sinks,
                    scratch,
                )
