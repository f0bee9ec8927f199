"""Verification of chains of drafts around the choices: which choice is whose, and which of them are kept."""

from __future__ import annotations

import triton
import triton.language as tl

from . import values as v


@triton.jit(do_not_specialize=["rows"])
def lay_out_choices(
    query_start,
    queries,
    slots,
    positions,
    slots_out,
    positions_out,
    places,
    drafts,
    rows,
    ROWS: tl.constexpr,
):
    """Of each of T choices, int64 [T]: slot, position, place in its row (how many drafts it follows) and the draft that
    it judges, -1 where there is none. Queries [T] beyond query_start[rows] get a row's slot, and nobody reads them."""
    choice = tl.program_id(0)
    at = tl.arange(0, ROWS)
    ends = tl.load(query_start + 1 + at, mask=at < rows, other=0x7FFFFFFF)
    owner = tl.sum((ends <= choice).to(tl.int32), 0)
    real = owner < rows
    owner = tl.minimum(owner, rows - 1)
    place = tl.where(real, choice - tl.load(query_start + owner), 0)
    judges = real & (choice + 1 < tl.load(query_start + owner + 1))
    tl.store(slots_out + choice, tl.load(slots + owner))
    tl.store(positions_out + choice, tl.load(positions + owner) + place)
    tl.store(places + choice, place.to(tl.int64))
    tl.store(drafts + choice, tl.load(queries + choice + 1, mask=judges, other=-1))


@triton.jit
def keep_drafts(
    choices,
    drafts,
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
):
    """One program a row: choices [T] up to the first that is not the draft it judges, the first that ends the text, or
    the row's max_length; they are counted. ids_out and path_out [N, WIDTH], -1 beyond; BLOCK >= WIDTH is a power of
    two. `stops` [C, STOPS], or where a slot has more a bit of its words."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    start = tl.load(query_start + row)
    size = tl.minimum(tl.load(query_start + row + 1) - start, WIDTH)
    step = tl.arange(0, BLOCK)
    chosen = tl.load(choices + start + step, mask=step < size, other=-1)
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
    tl.store(path_out + at, tl.where(inside, step, -1).to(tl.int64), mask=step < WIDTH)
    tl.store(count_out + row, kept)
    counted = inside & (chosen >= 0)
    before = v.integer(integers, slot, v.CHOSEN)
    tl.store(integers + slot * v.INTEGERS + v.CHOSEN, before + tl.sum(counted.to(tl.int64), 0))
    if WORDS != v.NO_WORDS:
        if (v.integer(integers, slot, v.FLAGS) & v.PENALTIES) != 0:
            # A token may come twice
            tl.atomic_add(words + slot * vocab + chosen, v.CHOSEN_ONCE, mask=counted)
