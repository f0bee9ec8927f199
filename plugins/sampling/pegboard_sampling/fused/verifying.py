"""Verification of chains and trees of drafts around the choices: which choice is whose, and which of them are kept."""

from __future__ import annotations

import triton
import triton.language as tl

from . import values as v


@triton.jit
def _parent(parents, start, place):
    """Of a row's query `place` > 0, for sure an earlier one: what idle rows have may be anything."""
    return tl.minimum(tl.maximum(tl.load(parents + start + place).to(tl.int32), 0), place - 1)


@triton.jit(do_not_specialize=["rows"])
def lay_out_choices(
    query_start,
    queries,
    parents,
    slots,
    positions,
    slots_out,
    positions_out,
    places,
    drafts,
    queries_out,
    rows,
    ROWS: tl.constexpr,
    TREES: tl.constexpr,
):
    """Of each of T choices, int64 [T]: slot, position, place in its row (how many drafts it follows) and the draft that
    it judges, -1 where there is none. Queries [T] beyond query_start[rows] get a row's slot, and nobody reads them.
    In a tree no choice judges a draft, and queries_out tells each query's id and parent (see `values.adjusted`)."""
    choice = tl.program_id(0)
    at = tl.arange(0, ROWS)
    ends = tl.load(query_start + 1 + at, mask=at < rows, other=0x7FFFFFFF)
    owner = tl.sum((ends <= choice).to(tl.int32), 0)
    real = owner < rows
    owner = tl.minimum(owner, rows - 1)
    start = tl.load(query_start + owner)
    place = tl.where(real, choice - start, 0)
    if TREES:
        query, depth = place + 0, place * 0
        while query > 0:
            query = _parent(parents, start, query)
            depth += 1
        back = tl.full([], 0, tl.int32)
        if place > 0:
            back = place - _parent(parents, start, place)
        id = tl.load(queries + choice) & 0xFFFFFFFF
        tl.store(queries_out + choice, (back.to(tl.int64) << 32) | id)
        place = depth
    else:
        judges = real & (choice + 1 < tl.load(query_start + owner + 1))
        tl.store(drafts + choice, tl.load(queries + choice + 1, mask=judges, other=-1))
    tl.store(slots_out + choice, tl.load(slots + owner))
    tl.store(positions_out + choice, tl.load(positions + owner) + place)
    tl.store(places + choice, place.to(tl.int64))


@triton.jit
def _follow(chosen, queries, parents, start, size, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """From the last token to the child that is the chosen id, as long as there is one: how many choices, int32 [BLOCK]
    after which queries, int64 [BLOCK] what was chosen there, -1 beyond."""
    behind = (step > 0) & (step < size)
    draft = tl.load(queries + start + step, mask=behind, other=-1)
    parent = tl.maximum(tl.load(parents + start + step, mask=behind, other=0).to(tl.int32), 0)
    here, kept = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    path = tl.full([BLOCK], -1, tl.int32)
    ids = tl.full([BLOCK], -1, tl.int64)
    for at in range(WIDTH):
        on = here < BLOCK  # the path
        id = tl.sum(tl.where(step == here, chosen, 0), 0)
        path = tl.where((step == at) & on, here, path)
        ids = tl.where((step == at) & on, id, ids)
        kept += on.to(tl.int32)
        right = behind & on & (parent == here) & (draft == id) & (draft >= 0)
        here = tl.min(tl.where(right, step, BLOCK), 0)
    return kept, path, ids


@triton.jit
def keep_drafts(
    choices,
    drafts,
    queries,
    parents,
    query_start,
    slots,
    positions,
    integers,
    stops,
    words,
    ids_out,
    count_out,
    path_out,
    vocab,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    TREES: tl.constexpr,
):
    """One program a row: choices [T] up to the first that is not the draft it judges, in a tree along the path of those
    that are drafts; up to the first that ends the text, or the row's max_length; they are counted. ids_out and path_out
    [N, WIDTH], -1 beyond; BLOCK >= WIDTH is a power of two. `stops` [C, STOPS], or where a slot has more a bit of its
    words."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    start = tl.load(query_start + row)
    size = tl.minimum(tl.load(query_start + row + 1) - start, WIDTH)
    step = tl.arange(0, BLOCK)
    chosen = tl.load(choices + start + step, mask=step < size, other=-1)
    if TREES:
        kept, path, chosen = _follow(chosen, queries, parents, start, size, step, WIDTH, BLOCK)
    else:
        path = step
        draft = tl.load(drafts + start + step, mask=step + 1 < size, other=-1)
        kept = 1 + tl.min(tl.where((draft == chosen) & (draft >= 0), BLOCK - 1, step), 0)
    own = tl.load(stops + slot * STOPS + tl.arange(0, STOPS))
    ends = tl.max((chosen[:, None] == own[None, :]).to(tl.int32), 1) > 0
    if WORDS != v.NO_WORDS:
        if (v.integer(integers, slot, v.FLAGS) & v.MANY_STOPS) != 0:
            word = tl.load(words + slot * vocab + chosen, mask=chosen >= 0, other=0)
            ends = (word & v.STOP) != 0
    ends = ends & (chosen >= 0)
    kept = tl.minimum(kept, 1 + tl.min(tl.where(ends, step, BLOCK - 1), 0)).to(tl.int64)
    kept = tl.minimum(kept, v.integer(integers, slot, v.MAX_LENGTH) - tl.load(positions + row))
    kept = tl.maximum(kept, 0)
    inside = step < kept
    at = row * WIDTH + step
    tl.store(ids_out + at, tl.where(inside, chosen, -1), mask=step < WIDTH)
    tl.store(path_out + at, tl.where(inside, path, -1).to(tl.int64), mask=step < WIDTH)
    tl.store(count_out + row, kept)
    counted = inside & (chosen >= 0)
    before = v.integer(integers, slot, v.CHOSEN)
    tl.store(integers + slot * v.INTEGERS + v.CHOSEN, before + tl.sum(counted.to(tl.int64), 0))
    if WORDS != v.NO_WORDS:
        if (v.integer(integers, slot, v.FLAGS) & v.PENALTIES) != 0:
            # A token may come twice
            tl.atomic_add(words + slot * vocab + chosen, v.CHOSEN_ONCE, mask=counted)
