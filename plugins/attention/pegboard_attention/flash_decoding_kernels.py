"""FlashDecoding: one program mixes a span of one row's entries for one KV head, a second kernel merges the spans.

Letters: R rows, n queries of a row, H query heads, K KV heads, G = H / K, D head size, S page size. A program's tile
has BLOCK_M rows of (query, head of the group) pairs, pair m being query m // G and head m % G.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), online softmax of Milakov and Gimelshein (2018).
Bytes that must move: each entry's K and V once a row, and q and the output; the limit is the memory's bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
#: A score that is masked. Finite, so that a difference of two of them is no NaN.
MASKED = tl.constexpr(-1.0e30)
#: Four bytes to four float16: offset binary, by 0x6400 | x = 1024 + x.
WIDEN_INT8 = tl.constexpr(
    """{
    .reg .b32 lo, hi, bias;
    mov.b32 bias, 0x64806480;
    prmt.b32 lo, $2, 0x64646464, 0x4140;
    prmt.b32 hi, $2, 0x64646464, 0x4342;
    sub.f16x2 $0, lo, bias;
    sub.f16x2 $1, hi, bias;
    }"""
)
#: e4m3 over 2^8: float16 has the same order of sign, exponent and mantissa. Subnormals included; NaN becomes 480.
WIDEN_E4M3_BITS = tl.constexpr(
    """{
    .reg .b32 lo, hi, slo, shi;
    prmt.b32 lo, $2, 0, 0x1404;
    prmt.b32 hi, $2, 0, 0x3424;
    shr.u32 slo, lo, 1;
    shr.u32 shi, hi, 1;
    and.b32 slo, slo, 0x3f803f80;
    and.b32 shi, shi, 0x3f803f80;
    lop3.b32 $0, lo, 0x80008000, slo, 0xEA;
    lop3.b32 $1, hi, 0x80008000, shi, 0xEA;
    }"""
)
#: e4m3 by the instruction of capability 8.9 and later.
WIDEN_E4M3 = tl.constexpr(
    """{
    .reg .b16 lo, hi;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
    }"""
)
#: The same without NaN: min takes the other number, 448.
WIDEN_E4M3_FINITE = tl.constexpr(
    """{
    .reg .b16 lo, hi;
    .reg .b32 top, wlo, whi;
    mov.b32 top, 0x5f005f00;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 wlo, lo;
    cvt.rn.f16x2.e4m3x2 whi, hi;
    min.f16x2 $0, wlo, top;
    min.f16x2 $1, whi, top;
    }"""
)


@triton.jit
def popcount(x):
    """Bits set in each int64."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return ((x + (x >> 32)) & 0x7F).to(tl.int32)


@triton.jit
def logarithm(x, ASSEMBLY: tl.constexpr):
    """log2 of positive normal x, to about 2^-22."""
    if ASSEMBLY:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.math.log2(x)
    return y


@triton.jit
def widen(x, FORMAT: tl.constexpr, FINITE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Bytes of a quantized cache -> float16: offset binary (1) to x - 128, e4m3 to x / 256 (2) or to x (3).

    FINITE: no NaN comes out, so that a weight of 0 gives 0."""
    if ASSEMBLY:
        if FORMAT == 1:
            CODE: tl.constexpr = WIDEN_INT8
        elif FORMAT == 2:
            CODE: tl.constexpr = WIDEN_E4M3_BITS
        else:
            CODE: tl.constexpr = WIDEN_E4M3_FINITE if FINITE else WIDEN_E4M3
        wide = tl.inline_asm_elementwise(CODE, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif FORMAT == 1:
        wide = x.to(tl.float16) - 128.0
    else:
        bits = x.to(tl.int16)
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return wide


@triton.jit
def blank(v, keep, ASSEMBLY: tl.constexpr):
    """v [BLOCK_N, BLOCK_D] with zeros, whatever was there, where `keep` [BLOCK_N] is false;
    16-bit numbers two at a time."""
    if ASSEMBLY and v.dtype.primitive_bitwidth == 16:
        mask, v = tl.broadcast(tl.where(keep, -1, 0).to(tl.int16)[:, None], v)
        v = tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [v, mask], dtype=v.dtype, is_pure=True, pack=2)
    else:
        v = tl.where(keep[:, None], v, 0.0)
    return v


@triton.jit
def page_of(table, start, offsets, pages, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page id of the tile at `start`, or of each of its entries."""
    if PAGE >= BLOCK_N:
        page = tl.load(table + start // PAGE)
    else:
        index = (start + offsets) // PAGE
        page = tl.load(table + index, mask=index < pages, other=0)
    return page


@triton.jit
def within_page(start, offsets, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    if PAGE > BLOCK_N:
        inside = tl.multiple_of(start % PAGE, BLOCK_N) + offsets
    else:  # tiles begin where pages do
        inside = offsets % PAGE
    return inside


@triton.jit
def load_tile(
    source,
    page,
    start,
    head,
    offsets,
    d,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ORDER: tl.constexpr,
    TMA: tl.constexpr,
):
    """Entries start + offsets of one KV head as [BLOCK_N, BLOCK_D]; ORDER "nhd", "hnd" or "hdn" is that of a page.
    `page` is one id, or one an entry where a page is shorter than the tile. Whole pages may be read, valid or not."""
    if TMA:
        if ORDER == "nhd":
            tile = source.load([page * PAGE + start % PAGE, head * D])
        elif ORDER == "hnd":
            tile = source.load([(page * K_HEADS + head) * PAGE + start % PAGE, 0])
        else:
            tile = source.load([(page * K_HEADS + head) * D, start % PAGE]).T
    else:
        entry = within_page(start, offsets, PAGE, BLOCK_N)
        place = page.to(tl.int64) * (PAGE * K_HEADS * D)
        STEP: tl.constexpr = PAGE if ORDER == "hdn" else 1
        if ORDER == "nhd":
            place = place + entry * (K_HEADS * D) + head * D
        elif ORDER == "hnd":
            place = place + (head * PAGE + entry) * D
        else:
            place = place + head * (PAGE * D) + entry
        at = source + place[:, None] + (d * STEP)[None, :]
        if BLOCK_D == D:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(d < D)[None, :], other=0)
    return tile


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
    one that this waits for, and that one must let this start only after a wait of its own.

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
        row = tl.load(items_ptr + item * 4)
        begin = tl.load(items_ptr + item * 4 + 1) * BLOCK_N
        end = tl.load(items_ptr + item * 4 + 2)
        splits = tl.load(items_ptr + item * 4 + 3)
        if row < 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    kv_len = tl.load(kv_len_ptr + row)
    token = tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - token if MANY else 1
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(kv_len - queries - window + 1, 0)
    if not SPLIT:
        begin = lowest // BLOCK_N * BLOCK_N
        end = kv_len
    table = table_ptr + row.to(tl.int64) * table_row
    final = tl.maximum(begin, (end - 1) // BLOCK_N * BLOCK_N)
    next_page = page_of(table, begin, offsets, pages, PAGE, BLOCK_N)
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
        next_page = page_of(table, tl.minimum(start + BLOCK_N, final), offsets, pages, PAGE, BLOCK_N)
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
    first = tl.load(first_ptr + row)
    splits = tl.load(first_ptr + row + 1) - first
    token = tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - token
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
