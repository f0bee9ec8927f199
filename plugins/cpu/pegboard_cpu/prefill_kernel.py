"""Causal attention of many queries a row over paged K/V, float32 (FlashAttention-2's loops: Dao 2023).

A unit of work is up to QUERIES consecutive query tokens of a row at one KV head, with the G = H / K query heads that
share it. It walks over the entries in blocks, which it copies out of their pages once: K turned over, so that scores
are sums over register tiles of entries, V as it is. For every few queries: scores of the block, softmax with a running
maximum, weighted sum of V. A query's bits depend on its entries and their places only, not on how the row is cut.
Letters: T query tokens, R rows, H query heads, K KV heads, D head size, S page size.
"""

from __future__ import annotations

from typing import Any, Final

import numpy

from .functions import exp
from .softmax import exponentials, greatest, last_factor, scale
from .tiles import HEAD_STEP, mixing_tile, turning_tile
from .vectors import WIDTH, get, get_double, get_int, get_long, inner, kernel, put, team_size, thread_number

#: Tokens of a unit, entries of a block, entries of a tile of scores, queries of a tile (what AVX2's registers hold).
QUERIES: Final = 32
BLOCK: Final = 256
PANEL: Final = 2 * WIDTH
TILE: Final = 8 if WIDTH == 16 else 4
_mix_many = mixing_tile(TILE, 2)
_mix_one = mixing_tile(1, 2)
_turn = turning_tile()

#: R, K, G, D, S; q, out; cache of k, of v; query_start, kv_len; page_table, step of its rows; window (0:
#: none), sinks (0: none), scratch, numbers of it a thread; scale, softcap (0: none)
LAYOUT: Final = "17q2d"


def scratch_numbers(group: int, head_size: int) -> int:
    """float32 numbers of scratch that a thread needs: a block of K and V; queries, their sums, and two numbers each;
    a tile of scores."""
    return 2 * BLOCK * head_size + QUERIES * group * (2 * head_size + 2) + TILE * BLOCK


@inner()
def _entry(pages: int, page_size: int, at: int, step: int) -> int:
    """Where entry `at` of a row lies, in bytes from the first of the cache."""
    return (get_int(pages, at // page_size) * page_size + at % page_size) * step  # type: ignore[no-any-return]


@inner()
def _copy_keys(k: int, step: int, size: int, pages: int, page_size: int, start: int, count: int, keys: int) -> None:
    """`count` entries of one head to keys [panel, D, PANEL]; zeros where the last panel has no more entries."""
    e = 0
    while e < count:
        column = keys + 4 * ((e // PANEL) * PANEL * size + e % PANEL)
        source = k + _entry(pages, page_size, start + e, step)
        if e + WIDTH <= count and page_size % WIDTH == 0:
            for d in range(0, size, WIDTH):
                _turn(source + 4 * d, step, 0, 0, 0, column + 4 * d * PANEL, 4 * PANEL)
            e += WIDTH
        else:
            for d in range(size):
                put(column, d * PANEL, get(source, d))
            e += 1
    for rest in range(count, -(-count // PANEL) * PANEL):
        column = keys + 4 * ((rest // PANEL) * PANEL * size + rest % PANEL)
        for d in range(size):
            put(column, d * PANEL, numpy.float32(0))


@inner()
def _copy_values(v: int, step: int, size: int, pages: int, page_size: int, start: int, count: int, values: int) -> None:
    """`count` entries of one head to values [entry, D]"""
    for e in range(count):
        scale(v + _entry(pages, page_size, start + e, step), size, numpy.float32(1), values + 4 * e * size)


@inner()
def _score(q: int, rows: int, size: int, keys: int, first: int, end: int, scores: int) -> None:
    """scores[:rows] of entries first .. end - 1 of a block, and of others in the same panels."""
    for panel in range(first // PANEL, -(-end // PANEL)):
        tile, place = keys + 4 * panel * PANEL * size, scores + 4 * panel * PANEL
        for row in range(rows):
            for e in range(PANEL):
                put(place + 4 * row * BLOCK, e, numpy.float32(0))
        if rows == TILE:
            _mix_many(q, 4 * size, tile, 4 * PANEL, size, place, 4 * BLOCK)
        else:
            for row in range(rows):
                _mix_one(q + 4 * row * size, 0, tile, 4 * PANEL, size, place + 4 * row * BLOCK, 0)


@inner()
def _mix(p: int, rows: int, size: int, values: int, first: int, end: int, out: int) -> None:
    """out[:rows] += p[:rows, first:end] V[first:end]"""
    if first >= end:
        return
    for d in range(0, 4 * size, 4 * HEAD_STEP):
        source = values + 4 * first * size + d
        if rows == TILE:
            _mix_many(p + 4 * first, 4 * BLOCK, source, 4 * size, end - first, out + d, 4 * size)
        else:
            for row in range(rows):
                weights, place = p + 4 * (row * BLOCK + first), out + 4 * row * size + d
                _mix_one(weights, 0, source, 4 * size, end - first, place, 0)


@inner()
def _attend_block(
    q: int,
    rows: int,
    size: int,
    keys: int,
    values: int,
    start: int,
    stop: int,
    group: int,
    row: int,
    ends: int,
    window: int,
    softcap: Any,
    peaks: int,
    totals: int,
    scores: int,
    out: int,
) -> None:
    """Queries row .. row + rows - 1 of a unit (query token `r // group` sees entries up to ends + r // group) on
    entries start .. stop - 1."""
    # All of these queries see entries low .. high - 1 of the block; some see from `least` and up to `most`
    oldest, newest = ends + row // group, ends + (row + rows - 1) // group
    most, high = min(newest, stop), min(oldest, stop)
    least = max(start, oldest - window) if window > 0 else start
    low = max(start, newest - window) if window > 0 else start
    if least >= most:
        return
    _score(q, rows, size, keys, least - start, most - start, scores)
    for r in range(rows):
        end = ends + (row + r) // group
        begin = max(start, end - window) if window > 0 else start
        end = min(end, stop)
        if begin < end:
            mine = scores + 4 * (r * BLOCK + begin - start)
            before = get(peaks, r)
            peak = greatest(mine, end - begin, softcap, before)
            total = exponentials(mine, end - begin, peak)
            if peak > before:
                kept = exp(before - peak)
                put(peaks, r, peak)
                put(totals, r, get(totals, r) * kept + total)
                scale(out + 4 * r * size, size, kept, out + 4 * r * size)
            else:
                put(totals, r, get(totals, r) + total)
            # In order of the entries: what not all see before what all see, and after it
            edge = low if low < high else end
            _mix(scores + 4 * r * BLOCK, 1, size, values, begin - start, edge - start, out + 4 * r * size)
    if low < high:
        _mix(scores, rows, size, values, low - start, high - start, out)
        for r in range(rows):
            end = min(ends + (row + r) // group, stop)
            _mix(scores + 4 * r * BLOCK, 1, size, values, high - start, end - start, out + 4 * r * size)


@inner()
def _attend(
    q: int,
    out: int,
    token_step: int,
    tokens: int,
    group: int,
    size: int,
    k: int,
    v: int,
    step: int,
    pages: int,
    page_size: int,
    ends: int,
    window: int,
    factor: Any,
    softcap: Any,
    sinks: int,
    scratch: int,
) -> None:
    """One unit: query token i sees entries up to ends + i - 1, `window` of them (0: all); q and out are the addresses
    of the first token at the first head, `token_step` the bytes from token to token."""
    rows = tokens * group
    keys, values = scratch, scratch + 4 * BLOCK * size
    scaled, sums = values + 4 * BLOCK * size, values + 4 * (BLOCK + QUERIES * group) * size
    peaks = sums + 4 * QUERIES * group * size
    totals = peaks + 4 * QUERIES * group
    scores = totals + 4 * QUERIES * group
    for token in range(tokens):
        scale(q + token * token_step, group * size, factor, scaled + 4 * token * group * size)
    for i in range(rows * size):
        put(sums, i, numpy.float32(0))
    for row in range(rows):
        put(peaks, row, numpy.float32(-numpy.inf))
        put(totals, row, numpy.float32(0))
    first, last = (max(0, ends - window) if window > 0 else 0), ends + tokens - 1
    start = first - first % BLOCK
    while start < last:
        stop = min(start + BLOCK, last)
        _copy_keys(k, step, size, pages, page_size, start, stop - start, keys)
        _copy_values(v, step, size, pages, page_size, start, stop - start, values)
        row = 0
        while row < rows:
            count = TILE if row + TILE <= rows else rows - row
            _attend_block(
                scaled + 4 * row * size,
                count,
                size,
                keys,
                values,
                start,
                stop,
                group,
                row,
                ends,
                window,
                softcap,
                peaks + 4 * row,
                totals + 4 * row,
                scores,
                sums + 4 * row * size,
            )
            row += count
        start += BLOCK
    for token in range(tokens):
        for g in range(group):
            row = token * group + g
            last_one = last_factor(get(peaks, row), get(totals, row), sinks, g)
            scale(sums + 4 * row * size, size, last_one, out + token * token_step + 4 * g * size)


@kernel
def prefill(call: int) -> None:
    rows, kv_heads, group = get_long(call, 0), get_long(call, 1), get_long(call, 2)
    size, page_size, q, out = get_long(call, 3), get_long(call, 4), get_long(call, 5), get_long(call, 6)
    k, v, query_start, kv_len = get_long(call, 7), get_long(call, 8), get_long(call, 9), get_long(call, 10)
    table, table_step, window, sinks = get_long(call, 11), get_long(call, 12), get_long(call, 13), get_long(call, 14)
    factor, softcap = numpy.float32(get_double(call, 17)), numpy.float32(get_double(call, 18))
    threads, thread = numpy.int64(team_size()), numpy.int64(thread_number())
    scratch = get_long(call, 15) + 4 * thread * get_long(call, 16)
    unit, head_step = 0, 4 * group * size
    token_step = kv_heads * head_step
    for row in range(rows):
        start, length = numpy.int64(get_int(query_start, row)), numpy.int64(get_int(kv_len, row))
        queries = numpy.int64(get_int(query_start, row + 1)) - start
        for query in range(0, queries, QUERIES):
            tokens = QUERIES if query + QUERIES < queries else queries - query
            place = (start + query) * token_step
            for head in range(kv_heads):
                # Later queries see more: to and fro, so that none of the threads has always the longer ones
                turn, mine = unit // threads, unit % threads
                unit += 1
                if thread != (threads - 1 - mine if turn % 2 == 1 else mine):
                    continue
                at, shift = place + head * head_step, 4 * head * size
                if length == 0:
                    for token in range(tokens):
                        for i in range(group * size):
                            put(out + at + token * token_step, i, numpy.float32(0))
                    continue
                _attend(
                    q + at,
                    out + at,
                    token_step,
                    tokens,
                    group,
                    size,
                    k + shift,
                    v + shift,
                    4 * kv_heads * size,
                    table + row * table_step,
                    page_size,
                    length - queries + query + 1,
                    window,
                    factor,
                    softcap,
                    sinks + 4 * head * group if sinks != 0 else 0,
                    scratch,
                )
