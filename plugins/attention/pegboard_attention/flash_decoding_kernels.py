"""FlashDecoding: one program mixes a span of one row's entries for one KV head, a second kernel merges the spans.

Letters: R rows, n queries of a row, H query heads, K KV heads, G = H / K, D head size, S page size. A program's tile
has BLOCK_M rows of (query, head of the group) pairs, pair m being query m // G and head m % G.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), online softmax of Milakov and Gimelshein (2018).
Bytes that must move: each entry's K and V once a row, and q and the output; the limit is the memory's bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .flash_decoding_loads import blank, load_tile, logarithm, page_of, popcount, within_page
from .widening import widen

LOG2E = tl.constexpr(1.4426950408889634)
#: A score that is masked. Finite, so that a difference of two of them is no NaN.
MASKED = tl.constexpr(-1.0e30)


@triton.jit
def attend_items(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    items_ptr,
    kv_len_ptr,
    query_start_ptr,
    ancestors_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_token,
    q_head,
    table_row,
    pages,
    scale,
    softcap,
    window,
    part_rows,
    K_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr,
    MANY: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    FORMAT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (K * QUERY_BLOCKS, items). Item (row, first tile, end, splits) from `schedule_items`, or row = item without
    SPLIT. A row's only split writes out [T, H, D]; others write their weighted mean and log2 of the sum of weights.

    With PDL, `items`, lengths, starts and page tables are read before the wait: they must come from kernels before the
    one that this waits for, and that one must let this start only after a wait of its own. They are read past the L1.

    FORMAT 0: K/V as they are, pages "nhd". Others: bytes, see `widen`; k pages "hnd", v pages "hdn", scales [K, S]."""
    block = tl.program_id(0)
    item = tl.program_id(1)
    head = block // QUERY_BLOCKS
    first_pair = block % QUERY_BLOCKS * BLOCK_M
    offsets = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    pair = first_pair + tl.arange(0, BLOCK_M)
    row = item
    splits = 1
    if SPLIT:
        row = tl.load(items_ptr + item * 4, cache_modifier=".cg")
        begin = tl.load(items_ptr + item * 4 + 1, cache_modifier=".cg") * BLOCK_N
        end = tl.load(items_ptr + item * 4 + 2, cache_modifier=".cg")
        splits = tl.load(items_ptr + item * 4 + 3, cache_modifier=".cg")
        if row < 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    kv_len = tl.load(kv_len_ptr + row, cache_modifier=".cg")
    token = tl.load(query_start_ptr + row, cache_modifier=".cg")
    queries = tl.load(query_start_ptr + row + 1, cache_modifier=".cg") - token if MANY else 1
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(kv_len - queries - window + 1, 0)
    if not SPLIT:
        begin = lowest // BLOCK_N * BLOCK_N
        end = kv_len
    table = table_ptr + row.to(tl.int64) * table_row
    final = tl.maximum(begin, (end - 1) // BLOCK_N * BLOCK_N)
    next_page = page_of(table, begin, offsets, pages, PAGE, BLOCK_N, PAST_L1=PDL)
    if PDL:
        # Only now: lengths, tables and items are older than the kernel that this one waits for (see its docstring)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if MANY:  # noqa: SIM102 - a constant: without it, the condition below is not compiled
        if first_pair >= queries * G:
            return

    before = kv_len - queries
    query = pair // G if MANY else tl.zeros_like(pair)
    live = pair < queries * G
    q_head_index = head * G + (pair % G if MANY else pair)
    last = before + query
    visible = tl.zeros([BLOCK_M], tl.int64)
    if TREE:
        visible = tl.load(ancestors_ptr + token + query, mask=live, other=0)
        place = before + popcount(visible) - 1
    else:
        place = last
    q_at = (token + query).to(tl.int64) * q_token + q_head_index * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    factor = tl.zeros([BLOCK_M], tl.float32) + scale
    if FORMAT != 0 and q.dtype != tl.float32:
        # float16 holds what the bytes widen to; a power of two brings q into its range without rounding
        peak = tl.max(tl.abs(q.to(tl.float32)), 1)
        unit = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = tl.where(unit > 1e-30, unit, 1.0)
        q = (q.to(tl.float32) / unit[:, None]).to(tl.float16)
        factor = factor * unit
    if FORMAT == 2:
        factor = factor * 256.0
    if not SOFTCAP:
        factor = factor * LOG2E

    peak_score = tl.zeros([BLOCK_M], tl.float32) + MASKED
    # Added up over entries only once, at the end: a sum over a tile costs a barrier
    weight_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        # The page table is read one tile ahead: a load that K and V wait for would halve the pipeline's depth
        page = next_page
        next_page = page_of(table, tl.minimum(start + BLOCK_N, final), offsets, pages, PAGE, BLOCK_N, PAST_L1=False)
        entry = start + offsets
        readable = entry < end
        if WINDOW:
            readable &= entry >= lowest
        if FORMAT == 0:
            k = load_tile(k_ptr, page, start, head, offsets, d, K_HEADS, D, BLOCK_D, PAGE, BLOCK_N, "nhd", TMA)
            v = load_tile(v_ptr, page, start, head, offsets, d, K_HEADS, D, BLOCK_D, PAGE, BLOCK_N, "nhd", TMA)
            v = blank(v, readable, ASSEMBLY)
        else:
            inside = within_page(start, offsets, PAGE, BLOCK_N)
            scales = (page.to(tl.int64) * K_HEADS + head) * PAGE + inside
            k_scale = tl.load(k_scale_ptr + scales)
            v_scale = tl.load(v_scale_ptr + scales)
            k = load_tile(k_ptr, page, start, head, offsets, d, K_HEADS, D, BLOCK_D, PAGE, BLOCK_N, "hnd", TMA)
            v = load_tile(v_ptr, page, start, head, offsets, d, K_HEADS, D, BLOCK_D, PAGE, BLOCK_N, "hdn", TMA)
            k = widen(k, FORMAT, False, ASSEMBLY).to(q.dtype)
            v = widen(v, FORMAT, True, ASSEMBLY).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if FORMAT != 0:
            scores = scores * k_scale[None, :]
        scores = scores * factor[:, None]
        if SOFTCAP:
            scores = (1.0 - 2.0 / (tl.math.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0)) * (softcap * LOG2E)
        allowed = readable[None, :]
        if MANY and not TREE:
            allowed = entry[None, :] <= last[:, None]
        if TREE:
            own = tl.minimum(tl.maximum(entry - before, 0), 63).to(tl.int64)
            allowed = readable[None, :] & ((entry < before)[None, :] | (((visible[:, None] >> own[None, :]) & 1) != 0))
        if WINDOW:
            allowed &= entry[None, :] > (place - window)[:, None]
        scores = tl.where(allowed, scores, MASKED)
        if FORMAT != 0:
            # V's scale joins the weight in its exponent, so that weights stay below 1 in float16
            bonus = tl.where(readable, logarithm(v_scale, ASSEMBLY), 0.0)
            boosted = scores + bonus[None, :]
            new_peak = tl.maximum(peak_score, tl.max(boosted, 1))
            weights = tl.math.exp2(boosted - new_peak[:, None])
            fade = tl.math.exp2(peak_score - new_peak)
            weight_sums = weight_sums * fade[:, None] + tl.math.exp2(scores - new_peak[:, None])
        else:
            new_peak = tl.maximum(peak_score, tl.max(scores, 1))
            weights = tl.math.exp2(scores - new_peak[:, None])
            fade = tl.math.exp2(peak_score - new_peak)
            weight_sums = weight_sums * fade[:, None] + weights
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        peak_score = new_peak
    total = tl.sum(weight_sums, 1)
    if FORMAT == 2:
        mixed *= 256.0

    store = live[:, None] & (d < D)[None, :]
    if splits > 1:
        mixed = mixed / total[:, None]
        slot = (item.to(tl.int64) * K_HEADS * QUERY_BLOCKS + block) * part_rows + (pair - first_pair)
        tl.store(partial_ptr + slot[:, None] * D + d[None, :], mixed, mask=store)
        tl.store(lse_ptr + slot, peak_score + tl.math.log2(total), mask=live)
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + q_head_index, mask=live, other=0.0) * LOG2E
            # All in units of the greater of the two, so that neither overflows
            new_peak = tl.maximum(peak_score, sink)
            mixed *= tl.math.exp2(peak_score - new_peak)[:, None]
            total = total * tl.math.exp2(peak_score - new_peak) + tl.math.exp2(sink - new_peak)
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        out_at = ((token + query).to(tl.int64) * (K_HEADS * G) + q_head_index) * D
        tl.store(out_ptr + out_at[:, None] + d[None, :], mixed.to(out_ptr.dtype.element_ty), mask=store)


@triton.jit
def merge_splits(
    partial_ptr,
    lse_ptr,
    first_ptr,
    query_start_ptr,
    sinks_ptr,
    out_ptr,
    part_rows,
    K_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (H, R * MAX_QUERY): the softmax-weighted mean of one query's splits, SPLITS at a time in a fixed order."""
    q_head = tl.program_id(0)
    row = tl.program_id(1) // MAX_QUERY
    query = tl.program_id(1) % MAX_QUERY
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    first = tl.load(first_ptr + row, cache_modifier=".cg")
    splits = tl.load(first_ptr + row + 1, cache_modifier=".cg") - first
    token = tl.load(query_start_ptr + row, cache_modifier=".cg")
    queries = tl.load(query_start_ptr + row + 1, cache_modifier=".cg") - token
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (splits <= 1) | (query >= queries):
        return
    pair = query * G + q_head % G
    block = q_head // G * QUERY_BLOCKS + pair // BLOCK_M
    peak = tl.full([], MASKED, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, SPLITS):
        there = start + s < splits
        slot = ((first + start + s).to(tl.int64) * K_HEADS * QUERY_BLOCKS + block) * part_rows + pair % BLOCK_M
        lse = tl.load(lse_ptr + slot, mask=there, other=MASKED)
        part = tl.load(partial_ptr + slot[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.where(there, tl.math.exp2(lse - new_peak), 0.0)
        fade = tl.math.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 0)
        mixed = mixed * fade + tl.sum(part * weights[:, None], 0)
        peak = new_peak
    if SINKS:
        sink = tl.load(sinks_ptr + q_head) * LOG2E
        new_peak = tl.maximum(peak, sink)
        mixed *= tl.math.exp2(peak - new_peak)
        total = total * tl.math.exp2(peak - new_peak) + tl.math.exp2(sink - new_peak)
    out_at = ((token + query).to(tl.int64) * (K_HEADS * G) + q_head) * D
    tl.store(out_ptr + out_at + d, (mixed / total).to(out_ptr.dtype.element_ty), mask=d < D)
