# Kernels are compiled by Triton: they are no typed Python
# mypy: ignore-errors
"""The forward pass for any GPU that Triton knows, and for its interpreter: pointers, masks, one tile a program.

A program holds the queries of a tile and walks over blocks of K and V, from the first to the last that any of them
sees; masks are only computed where some query does not see all of a block. It moves K and V once for each tile; the
matrix units are the limit, as long as loads are far enough ahead. Tiles of an eight-bit cache are widened after the
load, a few instructions an element, which comes to about half of what the softmax takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..widening import dequantized, unit_of, widen
from .schedule import END_BLOCK, FIELDS, FIRST_BLOCK, FIRST_TOKEN, KV_LEN, LOWEST, POSITION, ROW, TOKENS

#: Hidden scores are -inf, and a row's greatest score at least this: exp2(-inf - LEAST) is 0, not NaN, while a row has
#: seen nothing yet.
LEAST = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _page_ids(table_ptr, block, last, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """The pages of a block's entries; those after the row's last entry are on its page."""
    if PAGE == 0:
        return 0
    elif PAGE >= BLOCK:  # noqa: RET505  # compile-time branches
        return tl.load(table_ptr + tl.minimum(block * BLOCK, last) // PAGE)
    else:
        return tl.load(table_ptr + tl.minimum(block * BLOCK + tl.arange(0, BLOCK), last) // PAGE)


@triton.jit
def _load(at, readable, inside, WHOLE: tl.constexpr, MASKED: tl.constexpr):
    """A tile of entries and columns, zeros in place of entries that may not be read and of columns behind the head."""
    if MASKED:
        tile = tl.load(at, mask=readable & inside, other=0)
    elif WHOLE:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=inside, other=0)
    return tile


@triton.jit
def _blocks(
    acc, total, peak, q, k_ptr, v_ptr, table_ptr, first, end, position, kv_len, lowest, scale, pre_scale, window,
    k_page, k_entry, v_page, v_entry, k_scale_ptr, v_scale_ptr, scale_page,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks first to end - 1. k_ptr, v_ptr and scales: the row's first entry, or the pool's, of one head."""
    column = tl.arange(0, WIDTH)
    last = tl.maximum(kv_len - 1, 0)
    # A page id is asked for one block ahead: else its loads could not run ahead of the arithmetic
    pages = _page_ids(table_ptr, first, last, BLOCK, PAGE)
    for block in tl.range(first, end):
        entry = block * BLOCK + tl.arange(0, BLOCK)
        if PAGE == 0:
            k_place = entry.to(tl.int64) * k_entry
            v_place = entry.to(tl.int64) * v_entry
        else:
            page = pages.to(tl.int64)
            pages = _page_ids(table_ptr, tl.minimum(block + 1, end - 1), last, BLOCK, PAGE)
            k_place = page * k_page + (entry % PAGE) * k_entry
            v_place = page * v_page + (entry % PAGE) * v_entry
        readable = (entry >= lowest) & (entry < kv_len)
        inside = column < HEAD_SIZE
        WHOLE: tl.constexpr = WIDTH == HEAD_SIZE
        k = _load(k_ptr + k_place[None, :] + column[:, None], readable[None, :], inside[:, None], WHOLE, MASKED)
        if FORMAT == 0:
            v = _load(v_ptr + v_place[:, None] + column[None, :], readable[:, None], inside[None, :], WHOLE, MASKED)
        else:
            turned = v_ptr + v_place[None, :] + column[:, None] * PAGE
            v = _load(turned, readable[None, :], inside[:, None], WHOLE, MASKED)
            place = page * scale_page + entry % PAGE
            if MASKED:
                k_scale = tl.load(k_scale_ptr + place, mask=readable, other=0.0)
                v_scale = tl.load(v_scale_ptr + place, mask=readable, other=0.0)
            else:
                k_scale = tl.load(k_scale_ptr + place)
                v_scale = tl.load(v_scale_ptr + place)
            k = widen(k, FORMAT, False, ASSEMBLY).to(q.dtype)  # exact: scores are scaled instead
            v = tl.trans(dequantized(v, v_scale[None, :], q.dtype, FORMAT, ASSEMBLY))
        s = tl.dot(q, k, input_precision="ieee")
        if FORMAT != 0:
            s *= (k_scale * unit_of(FORMAT))[None, :]
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1)
            s = 1 - 2 / (tl.math.exp2(s * pre_scale) + 1)
        if MASKED:
            if CAUSAL:
                back = position[:, None] - entry[None, :]
                seen = (back >= 0) & (back < window)
            else:
                seen = (entry < kv_len)[None, :]
            s = tl.where(seen, s, -float("inf"))
        higher = tl.maximum(peak, tl.max(s, 1) * scale)
        p = tl.math.exp2(s * scale - higher[:, None])
        fade = tl.math.exp2(peak - higher)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = higher
    return acc, total, peak


@triton.jit
def portable_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, table_ptr, kv_start_ptr, tiles_ptr, count_ptr,
    q_token, q_head, k_page, k_entry, k_head, v_page, v_entry, v_head, table_stride, tokens,
    scale, pre_scale, window, groups, groups_per_kv, k_scale_ptr, v_scale_ptr, scale_page, scale_head,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """See the module. Strides in elements; out [T, H, D] contiguous, lse [H, T]; the last dimension of all is
    contiguous. Rows of a tile are queries, each with HEADS heads side by side."""
    tile = tl.program_id(0) // groups
    if tile >= tl.load(count_ptr):
        return
    group = tl.program_id(0) % groups
    kv_head = (group // groups_per_kv).to(tl.int64)
    record = tiles_ptr + tile * FIELDS
    row = tl.load(record + ROW)
    first_token = tl.load(record + FIRST_TOKEN)
    valid = tl.load(record + TOKENS)
    first_position = tl.load(record + POSITION)
    kv_len = tl.load(record + KV_LEN)
    first_block = tl.load(record + FIRST_BLOCK)
    end_block = tl.load(record + END_BLOCK)
    lowest = tl.load(record + LOWEST)
    table_ptr += row.to(tl.int64) * table_stride
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    if FORMAT != 0:
        k_scale_ptr += kv_head * scale_head
        v_scale_ptr += kv_head * scale_head
    if PAGE == 0:
        start = tl.load(kv_start_ptr + row).to(tl.int64)
        k_ptr += start * k_entry
        v_ptr += start * v_entry

    query = tl.arange(0, ROWS) // HEADS
    head = group * HEADS + tl.arange(0, ROWS) % HEADS
    column = tl.arange(0, WIDTH)
    token = (first_token + query).to(tl.int64)
    mask = (query < valid)[:, None] & (column < HEAD_SIZE)[None, :]
    q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + column[None, :], mask=mask, other=0.0)
    position = first_position + query

    # Blocks that fall out of some queries' window, that all see, that not all see to the end
    whole_first = first_block
    if WINDOW:
        last_start = first_position + valid - window  # the first entry that the last query sees
        whole_first = tl.minimum(tl.maximum((last_start + BLOCK - 1) // BLOCK, first_block), end_block)
    if CAUSAL:
        whole_end = tl.minimum((first_position + 1) // BLOCK, end_block)
    else:
        whole_end = kv_len // BLOCK
    whole_end = tl.maximum(whole_end, whole_first)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LEAST, tl.float32)
    if WINDOW:
        acc, total, peak = _blocks(
            acc, total, peak, q, k_ptr, v_ptr, table_ptr, first_block, whole_first, position, kv_len, lowest, scale,
            pre_scale, window, k_page, k_entry, v_page, v_entry, k_scale_ptr, v_scale_ptr, scale_page,
            BLOCK, PAGE, WIDTH, HEAD_SIZE, CAUSAL, SOFTCAP, FORMAT, ASSEMBLY, True,
        )  # fmt: skip
    acc, total, peak = _blocks(
        acc, total, peak, q, k_ptr, v_ptr, table_ptr, whole_first, whole_end, position, kv_len, lowest, scale,
        pre_scale, window, k_page, k_entry, v_page, v_entry, k_scale_ptr, v_scale_ptr, scale_page,
        BLOCK, PAGE, WIDTH, HEAD_SIZE, CAUSAL, SOFTCAP, FORMAT, ASSEMBLY, False,
    )  # fmt: skip
    acc, total, peak = _blocks(
        acc, total, peak, q, k_ptr, v_ptr, table_ptr, whole_end, end_block, position, kv_len, lowest, scale,
        pre_scale, window, k_page, k_entry, v_page, v_entry, k_scale_ptr, v_scale_ptr, scale_page,
        BLOCK, PAGE, WIDTH, HEAD_SIZE, CAUSAL, SOFTCAP, FORMAT, ASSEMBLY, True,
    )  # fmt: skip

    seen_any = total > 0
    if SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        higher = tl.maximum(peak, sink)
        fade = tl.math.exp2(peak - higher)
        total = total * fade + tl.math.exp2(sink - higher)
        acc = acc * fade[:, None]
        peak = higher
    total = tl.where(seen_any, total, 1.0)
    acc = tl.where(seen_any[:, None], acc / total[:, None], 0.0)
    if LSE:
        lse = tl.where(seen_any, (peak + tl.math.log2(total)) * LN2, -float("inf"))
        tl.store(lse_ptr + head.to(tl.int64) * tokens + token, lse, mask=query < valid)
    heads_in_all = groups * HEADS
    place = (token * heads_in_all + head) * HEAD_SIZE
    tl.store(o_ptr + place[:, None] + column[None, :], acc.to(o_ptr.dtype.element_ty), mask=mask)
