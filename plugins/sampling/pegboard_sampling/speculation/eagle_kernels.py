"""Attention of the EAGLE layer in Triton: two launches, which read the entries that there are and copy none.

Letters: R rows, w entries of each, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["width", "entries"])
def turn_and_write(
    qkv,
    turned,
    keys,
    values,
    cos,
    sin,
    slots,
    starts,
    counts,
    width,
    entries,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    TURNING: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program turns one head of one entry: a query goes to `turned` [R, w, H, D], key and value to their entry."""
    token, head = tl.program_id(0), tl.program_id(1)
    row = token // width
    inside = token % width
    place = tl.load(starts + row) + inside
    d = tl.arange(0, BLOCK)
    real = d < SIZE
    source = qkv + (token.to(tl.int64) * (HEADS + 2 * SHARED) + head) * SIZE
    x = tl.load(source + d, mask=real, other=0.0)
    if head < HEADS + SHARED:
        if INTERLEAVED:
            pair, other, before = d // 2, d ^ 1, d % 2 == 0
        else:
            pair = d % (TURNING // 2)
            before = d < TURNING // 2
            other = tl.where(before, d + TURNING // 2, d - TURNING // 2)
        turns = d < TURNING
        y = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
        at = tl.minimum(place, entries - 1) * (TURNING // 2) + pair
        c = tl.load(cos + at, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * c + tl.where(before, -y, y) * s).to(x.dtype)
    if head < HEADS:
        tl.store(turned + (token.to(tl.int64) * HEADS + head) * SIZE + d, x, mask=real)
    else:
        written = (inside < tl.load(counts + row)) & (place < entries - 1)
        entry = tl.load(slots + row) * entries + place
        kept = (head - HEADS) % SHARED
        target = keys if head < HEADS + SHARED else values
        tl.store(target + (entry * SHARED + kept) * SIZE + d, x, mask=real & written)


@triton.jit(do_not_specialize=["width", "entries"])
def attend_entries(
    turned,
    keys,
    values,
    mixed,
    slots,
    starts,
    base,
    scale,
    width,
    entries,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """A program mixes some queries [R, w, H, D] of the heads that share a KV head."""
    row, shared, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // SHARED
    slot, start = tl.load(slots + row), tl.load(starts + row)
    first = tl.load(base + slot)
    m = part * QUERIES + tl.arange(0, QUERIES)
    query, d = m // group, tl.arange(0, BLOCK)
    asked = query < width
    place = start + query
    at = ((row.to(tl.int64) * width + query) * HEADS + shared * group + m % group) * SIZE
    own = asked[:, None] & (d[None] < SIZE)
    q = tl.load(turned + at[:, None] + d[None], mask=own, other=0.0)
    end = tl.minimum(start + tl.minimum((part * QUERIES + QUERIES - 1) // group, width - 1) + 1, entries)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, BLOCK], tl.float32)
    for begin in range(first, end, ENTRIES):
        e = begin + tl.arange(0, ENTRIES)
        there = (e < end)[:, None] & (d[None] < SIZE)
        entry = ((slot * entries + e) * SHARED + shared) * SIZE
        k = tl.load(keys + entry[:, None] + d[None], mask=there, other=0.0)
        v = tl.load(values + entry[:, None] + d[None], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(e[None] <= place[:, None], scores, float("-inf"))
        found = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(found == float("-inf"), 0.0, found)
        shares = tl.exp(scores - safe[:, None])
        kept = tl.exp(peak - safe)
        mass = mass * kept + tl.sum(shares, 1)
        total = total * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        peak = found
    total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]  # who sees nothing gives nothing
    tl.store(mixed + at[:, None] + d[None], total.to(q.dtype), mask=own)
