# Kernels are compiled by Triton: they are no typed Python
# mypy: ignore-errors
"""Gradients of attention, with scores recomputed tile by tile from the row sums that the forward pass kept.

Two kernels: one holds a block of K and V and walks over the queries that see it, the other holds queries and walks over
blocks. Nothing is accumulated across programs, so that gradients are the same in every run. Memory beside the results:
two numbers a query and head (Dao, 2023, arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _weights(
    q, k, lse, query, entry, queries, kv_len, scale, pre_scale, window,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """p [M, N], and how the score follows q.k: 1, or 1 - tanh^2 for a capped score."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    slope = tl.full(s.shape, 1.0, tl.float32)
    if SOFTCAP:
        s = 1 - 2 / (tl.math.exp2(s * pre_scale) + 1)
        slope = 1 - s * s
    seen = (query < queries)[:, None] & (entry < kv_len)[None, :]
    if CAUSAL:
        back = (kv_len - queries + query)[:, None] - entry[None, :]
        seen = seen & (back >= 0) & (back < window)
    p = tl.where(seen, tl.math.exp2(s * scale - (lse * LOG2E)[:, None]), 0.0)
    return p, slope


@triton.jit
def _of_queries(
    q_ptr, dout_ptr, lse_ptr, delta_ptr, query, queries, first_token, tokens, head, query_heads,
    WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """What both kernels need of a tile of queries of one head: q, dout, lse, delta, and the tile's place and mask."""
    column = tl.arange(0, WIDTH)
    inside = query < queries
    place = ((first_token + query) * query_heads + head)[:, None] * HEAD_SIZE + column[None, :]
    mask = inside[:, None] & (column < HEAD_SIZE)[None, :]
    q = tl.load(q_ptr + place, mask=mask, other=0.0)
    dout = tl.load(dout_ptr + place, mask=mask, other=0.0)
    sums = head.to(tl.int64) * tokens + first_token + query
    lse = tl.load(lse_ptr + sums, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + sums, mask=inside, other=0.0)
    return q, dout, lse, delta, place, mask


@triton.jit
def _of_entries(
    k_ptr, v_ptr, entry, kv_len, first_entry, kv_head, kv_heads, WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr
):
    """A block of K and V of one head, and its place and mask."""
    column = tl.arange(0, WIDTH)
    place = ((first_entry + entry) * kv_heads + kv_head)[:, None] * HEAD_SIZE + column[None, :]
    mask = (entry < kv_len)[:, None] & (column < HEAD_SIZE)[None, :]
    return tl.load(k_ptr + place, mask=mask, other=0.0), tl.load(v_ptr + place, mask=mask, other=0.0), place, mask


@triton.jit
def _row(row, query_start_ptr, kv_start_ptr):
    """A row's first token and queries, first entry and entries."""
    first_token = tl.load(query_start_ptr + row).to(tl.int64)
    queries = (tl.load(query_start_ptr + row + 1) - first_token).to(tl.int32)
    first_entry = tl.load(kv_start_ptr + row).to(tl.int64)
    kv_len = (tl.load(kv_start_ptr + row + 1) - first_entry).to(tl.int32)
    return first_token, queries, first_entry, kv_len


@triton.jit
def kv_gradients(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, query_start_ptr, kv_start_ptr,
    tokens, query_heads, kv_heads, scale, pre_scale, slope_scale, window,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """q, dout [T, H, D]; k, v, dk, dv [E, K, D]; lse, delta [H, T], all contiguous. Grid: (blocks, rows, K)."""
    kv_head = tl.program_id(2)
    first_token, queries, first_entry, kv_len = _row(tl.program_id(1), query_start_ptr, kv_start_ptr)
    start = tl.program_id(0) * N
    if start >= kv_len:
        return
    entry = start + tl.arange(0, N)
    k, v, kv_place, kv_mask = _of_entries(
        k_ptr, v_ptr, entry, kv_len, first_entry, kv_head, kv_heads, WIDTH, HEAD_SIZE
    )  # fmt: skip
    dk = tl.zeros([N, WIDTH], tl.float32)
    dv = tl.zeros([N, WIDTH], tl.float32)

    first_query, end_query = 0, queries
    if CAUSAL:
        first_query = tl.maximum(start - (kv_len - queries), 0) // M * M
        end_query = tl.minimum(queries, start + N - 1 - (kv_len - queries) + window)
    group = query_heads // kv_heads
    for member in range(group):
        head = kv_head * group + member
        for begin in range(first_query, end_query, M):
            query = begin + tl.arange(0, M)
            q, dout, lse, delta, _, _ = _of_queries(
                q_ptr, dout_ptr, lse_ptr, delta_ptr, query, queries, first_token, tokens, head, query_heads,
                WIDTH, HEAD_SIZE,
            )  # fmt: skip
            p, slope = _weights(
                q, k, lse, query, entry, queries, kv_len, scale, pre_scale, window, CAUSAL, SOFTCAP
            )  # fmt: skip
            dv += tl.dot(tl.trans(p.to(dout.dtype)), dout, input_precision="ieee")
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None]) * slope
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
    tl.store(dk_ptr + kv_place, (dk * slope_scale).to(dk_ptr.dtype.element_ty), mask=kv_mask)
    tl.store(dv_ptr + kv_place, dv.to(dv_ptr.dtype.element_ty), mask=kv_mask)


@triton.jit
def query_gradients(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, query_start_ptr, kv_start_ptr,
    tokens, query_heads, kv_heads, scale, pre_scale, slope_scale, window,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, HEAD_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """As kv_gradients; dq [T, H, D]. Grid: (tiles of queries, rows, H)."""
    head = tl.program_id(2)
    first_token, queries, first_entry, kv_len = _row(tl.program_id(1), query_start_ptr, kv_start_ptr)
    begin = tl.program_id(0) * M
    if begin >= queries:
        return
    kv_head = head // (query_heads // kv_heads)
    query = begin + tl.arange(0, M)
    q, dout, lse, delta, place, mask = _of_queries(
        q_ptr, dout_ptr, lse_ptr, delta_ptr, query, queries, first_token, tokens, head, query_heads,
        WIDTH, HEAD_SIZE,
    )  # fmt: skip
    dq = tl.zeros([M, WIDTH], tl.float32)

    first, end = 0, kv_len
    if CAUSAL:
        position = kv_len - queries + begin
        first = tl.maximum(position - window + 1, 0) // N * N
        end = tl.minimum(position + M, kv_len)
    for start in range(first, end, N):
        entry = start + tl.arange(0, N)
        k, v, _, _ = _of_entries(k_ptr, v_ptr, entry, kv_len, first_entry, kv_head, kv_heads, WIDTH, HEAD_SIZE)
        p, slope = _weights(q, k, lse, query, entry, queries, kv_len, scale, pre_scale, window, CAUSAL, SOFTCAP)
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * slope
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    tl.store(dq_ptr + place, (dq * slope_scale).to(dq_ptr.dtype.element_ty), mask=mask)
