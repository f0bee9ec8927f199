"""`flash_attention`: attention over K/V that lie side by side, with gradients; what training of draft heads needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from pegboard.dtypes import dtype_name
from pegboard.errors import PegboardError

from .backward import kv_gradients, query_gradients
from .paths import choose_path, device_capability
from .problem import Entries, Forward, Mixing
from .schedule import make_schedule
from .tiling import Tiling, backward_tilings, padded_width


@dataclass(frozen=True)
class Ragged:
    """Where rows begin: query_start and kv_start [R+1] int32, and bounds of the longest row."""

    query_start: Tensor
    kv_start: Tensor
    max_query: int
    max_kv: int


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_start: Tensor | None = None,
    kv_start: Tensor | None = None,
    max_query: int | None = None,
    max_kv: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(mask(scale * q k^T)) v, exact, in memory that grows with T and not with T^2; differentiable in q, k, v.

    Dense: q [B, n, H, D], k and v [B, m, K, D]. Ragged: q [T, H, D], k and v [E, K, D] with query_start and kv_start
    [R+1] int32 on their device, and optionally bounds of the longest row, without which the whole is taken for one.
    H % K == 0. Queries are the last of their row's entries: query i sees entries 0 .. m - n + i when causal, of which
    the last `window`; scores are softcap * tanh(score / softcap); `scale` is 1 / sqrt(D) by default.

    Returns out, like q, and lse [H, T] float32, the natural logarithm of each softmax's sum, which carries no gradient
    (-inf, and zeros in out, for a query that sees nothing). bfloat16 and float16 on CUDA; float32 and float16 under
    Triton's interpreter. PegboardError: shapes or dtypes that don't fit.
    """
    ragged = query_start is not None or kv_start is not None
    _check(q, k, v, 3 if ragged else 4, causal, window)
    if ragged:
        if query_start is None or kv_start is None or query_start.shape != kv_start.shape:
            raise PegboardError("ragged rows need query_start and kv_start, both [rows + 1]")
        rows = Ragged(query_start, kv_start, max_query or q.shape[0], max_kv or k.shape[0])
    else:
        batch, queries, entries = q.shape[0], q.shape[1], k.shape[1]
        count = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        rows = Ragged(count * queries, count * entries, queries, entries)
    mixing = Mixing(
        query_heads=q.shape[-2],
        kv_heads=k.shape[-2],
        head_size=q.shape[-1],
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    flat = (x if ragged else x.flatten(0, 1) for x in (q, k, v))
    out, lse = _FlashAttention.apply(*flat, rows, mixing)  # type: ignore[no-untyped-call]
    return out.view(q.shape), lse


def _check(q: Tensor, k: Tensor, v: Tensor, dimensions: int, causal: bool, window: int | None) -> None:
    if q.ndim != dimensions or k.ndim != dimensions or k.shape != v.shape:
        form = "[tokens, heads, D]" if dimensions == 3 else "[batch, tokens, heads, D]"
        raise PegboardError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; must be {form}, k and v alike"
        )
    if q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2] or (dimensions == 4 and q.shape[0] != k.shape[0]):
        raise PegboardError(f"q {tuple(q.shape)} does not go with k {tuple(k.shape)}: batch, heads or head size")
    if not q.dtype == k.dtype == v.dtype:
        raise PegboardError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; must be one dtype")
    interpreted = triton.knobs.runtime.interpret
    if not interpreted and (q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16)):
        raise PegboardError(f"runs in bfloat16 and float16 on CUDA devices, not in {q.dtype} on {q.device}")
    if window is not None and (window < 1 or not causal):
        raise PegboardError(
            f"a window is at least 1 entry and needs causal attention, not {window} and causal={causal}"
        )


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Ragged, mixing: Mixing) -> tuple[Tensor, Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        path = choose_path("auto", device_capability(q.device), dtype_name(q.dtype), mixing.head_size)
        tiling = path.tiling
        schedule = make_schedule(
            rows.query_start,
            rows.kv_start.diff(),
            tokens=q.shape[0],
            max_query=rows.max_query,
            tile_tokens=tiling.rows // mixing.packed_heads(tiling.rows),
            block=tiling.block,
            causal=mixing.causal,
            window=mixing.window,
        )
        out = torch.empty_like(q)
        lse = torch.empty(mixing.query_heads, q.shape[0], dtype=torch.float32, device=q.device)
        entries = Entries(k[None], v[None], starts=rows.kv_start)
        path.launch(Forward(q, entries, schedule, mixing, tiling, out, lse=lse))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rows, ctx.mixing = rows, mixing
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        rows: Ragged = ctx.rows
        mixing: Mixing = ctx.mixing
        dout = dout.contiguous()
        # Sum of dout * out over D: what a weight's gradient lacks of its score's, the same for all entries of a query
        delta = (dout.float() * out.float()).sum(-1).t().contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scale, pre_scale = mixing.exponents
        shared = (q.shape[0], mixing.query_heads, mixing.kv_heads, scale, pre_scale, mixing.scale, mixing.reach)
        constants = {
            "WIDTH": padded_width(mixing.head_size),
            "HEAD_SIZE": mixing.head_size,
            "CAUSAL": mixing.causal,
            "SOFTCAP": mixing.softcap is not None,
        }
        count = rows.query_start.shape[0] - 1
        starts = (rows.query_start, rows.kv_start)
        per_block, per_query = backward_tilings(mixing.head_size)
        kv_gradients[(triton.cdiv(rows.max_kv, per_block.block), count, mixing.kv_heads)](
            q, k, v, dout, lse, delta, dk, dv, *starts, *shared, **constants, **_compiled_for(per_block)
        )
        query_gradients[(triton.cdiv(rows.max_query, per_query.rows), count, mixing.query_heads)](
            q, k, v, dout, lse, delta, dq, *starts, *shared, **constants, **_compiled_for(per_query)
        )
        return dq, dk, dv, None, None


def _compiled_for(tiling: Tiling) -> dict[str, int]:
    return {"M": tiling.rows, "N": tiling.block, "num_warps": tiling.warps, "num_stages": tiling.stages}
