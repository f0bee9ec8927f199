"""Norms by head, rotary embedding and the write into the cache, in one launch."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pegboard.contracts.attention import KVLayout, LayerCache
from pegboard.contracts.ops import Norm, Rope
from pegboard.dtypes import FLOAT_DTYPES

from .launching import Launcher

#: Layout name -> how it is written: as it is, in offset binary, as e4m3 bits.
_FORMATS: Final = {"nhd": 0, "hnd-int8": 1, "hnd-float8_e4m3fn": 2}
_NAMES: Final = {"nhd": ("k", "v")} | dict.fromkeys(("hnd-int8", "hnd-float8_e4m3fn"), ("k", "v", "k_scale", "v_scale"))
_HEADS = 8


def can_write(layout: KVLayout) -> bool:
    """Layouts "nhd" of floats, and those of eight bits with turned values and a scale for each token and head."""
    names = tuple(tensor.name for tensor in layout.tensors)
    if names != _NAMES.get(layout.name):
        return False
    k, v = layout.tensors[:2]
    if _FORMATS[layout.name] == 0:
        return k.dtype == v.dtype and k.dtype in FLOAT_DTYPES[:3] and len(k.shape) == len(v.shape) == 3
    heads, page, size = k.shape
    stored = "uint8" if layout.name == "hnd-int8" else "float8_e4m3fn"
    scales = {(tensor.shape, tensor.dtype) for tensor in layout.tensors[2:]}
    return v.shape == (heads, size, page) and {k.dtype, v.dtype} == {stored} and scales == {((heads, page), "float32")}


@triton.jit
def normed(x, rms, weight, ROUND_FIRST: tl.constexpr):
    """x [HEADS, D] float32 of the dtype of `weight`'s products, rounded as the reference rounds."""
    scaled = x.to(tl.float32) * rms[:, None]
    if ROUND_FIRST:
        out = (scaled.to(x.dtype).to(tl.float32) * weight.to(x.dtype).to(tl.float32)).to(x.dtype)
    else:
        out = (scaled * weight).to(x.dtype)
    return out


@triton.jit
def eight_bits(x, scale, FORMAT: tl.constexpr):
    """x / scale as bytes: offset binary (1) or e4m3 (2), rounded to the nearest, ties to even."""
    ratio = x / scale
    if FORMAT == 1:
        whole = (ratio + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no room for a fraction
        code = (whole + 128.0).to(tl.int32)
    else:
        # float16 bits of the number over 2^8 are those of e4m3 with seven more of mantissa
        bits = (ratio * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        size = bits & 0x7FFF
        code = ((bits >> 8) & 0x80) | ((size + 0x3F + ((size >> 7) & 1)) >> 7)
    return code.to(tl.uint8)


@triton.jit
def rotate_and_write(
    qkv_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    index_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    qkv_row,
    rope_row,
    q_eps,
    q_offset,
    k_eps,
    k_offset,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TURNING: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    Q_ROUND_FIRST: tl.constexpr,
    K_ROUND_FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens, blocks of HEADS among q, k and v heads). TURNING: dimensions that turn, 0 for none."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    if PDL:
        tl.extra.cuda.gdc_wait()
    there = (head < H + 2 * K)[:, None] & (d < D)[None, :]
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), (head >= H + K) & (head < H + 2 * K)
    at = qkv_ptr + token * qkv_row + (head * D)[:, None]
    x = tl.load(at + d[None, :], mask=there, other=0.0)
    index = tl.load(index_ptr + token)
    HALF: tl.constexpr = TURNING // 2
    if INTERLEAVED:
        partner = tl.where(d < TURNING, d ^ 1, d)
        angle = d // 2
        first = d % 2 == 0
    else:
        partner = tl.where(d < HALF, d + HALF, tl.where(d < TURNING, d - HALF, d))
        angle = tl.where(d < HALF, d, d - HALF)
        first = d < HALF
    if TURNING:
        y = tl.load(at + partner[None, :], mask=there, other=0.0)
    if Q_NORM or K_NORM:
        wide = x.to(tl.float32)
        mean = tl.sum(wide * wide, 1) / D
        if Q_NORM:
            rms = tl.rsqrt(mean + q_eps)
            weight = tl.load(q_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32) + q_offset
            x = tl.where(is_q[:, None], normed(x, rms, weight[None, :], Q_ROUND_FIRST), x)
            if TURNING:
                weight = tl.load(q_weight_ptr + partner, mask=d < D, other=0.0).to(tl.float32) + q_offset
                y = tl.where(is_q[:, None], normed(y, rms, weight[None, :], Q_ROUND_FIRST), y)
        if K_NORM:
            rms = tl.rsqrt(mean + k_eps)
            weight = tl.load(k_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32) + k_offset
            x = tl.where(is_k[:, None], normed(x, rms, weight[None, :], K_ROUND_FIRST), x)
            if TURNING:
                weight = tl.load(k_weight_ptr + partner, mask=d < D, other=0.0).to(tl.float32) + k_offset
                y = tl.where(is_k[:, None], normed(y, rms, weight[None, :], K_ROUND_FIRST), y)
    if TURNING:
        turns = d < TURNING
        row = tl.load(positions_ptr + token) * rope_row
        cos = tl.load(cos_ptr + row + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + row + angle, mask=turns, other=0.0)
        sin = tl.where(first, -sin, sin)
        turned = x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * sin[None, :]
        x = tl.where(is_v[:, None], x, turned.to(x.dtype))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(q_ptr + token * (H * D) + (head * D)[:, None] + d[None, :], x, mask=there & is_q[:, None])

    kv_head = tl.where(is_k, head - H, head - H - K)
    store_k, store_v = there & is_k[:, None], there & is_v[:, None]
    if FORMAT == 0:
        entry = index * (K * D) + (kv_head * D)[:, None] + d[None, :]
        tl.store(k_ptr + entry, x.to(k_ptr.dtype.element_ty), mask=store_k)
        tl.store(v_ptr + entry, x.to(v_ptr.dtype.element_ty), mask=store_v)
    else:
        TOP: tl.constexpr = 127.0 if FORMAT == 1 else 448.0
        wide = x.to(tl.float32)
        # 2^-100: the reader takes the logarithm
        scale = tl.maximum(tl.max(tl.abs(wide), 1) / TOP, 7.888609052210118e-31)
        code = eight_bits(wide, scale[:, None], FORMAT)
        in_page = index // PAGE * K + kv_head
        inside = index % PAGE
        tl.store(k_ptr + (in_page * (PAGE * D) + inside * D)[:, None] + d[None, :], code, mask=store_k)
        tl.store(v_ptr + (in_page * (PAGE * D) + inside)[:, None] + (d * PAGE)[None, :], code, mask=store_v)
        tl.store(k_scale_ptr + in_page * PAGE + inside, scale, mask=is_k)
        tl.store(v_scale_ptr + in_page * PAGE + inside, scale, mask=is_v)


def launch_rope_write(
    qkv: Tensor,
    heads: tuple[int, int, int],
    positions: Tensor,
    rope: Rope | None,
    cache: LayerCache,
    write_index: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    launcher: Launcher,
) -> Tensor:
    """qkv [T, (H + 2K) * D] with dense rows -> q [T, H, D]; k and v go into the cache.

    Reference: `pegboard.ops.TorchOps.rope_write`, whose roundings after norm and rotation it repeats; results differ by
    at most one unit in the last place of qkv's dtype. Quantized: |x - scale * code| <= scale / 2 (int8), <= |x| / 16
    (e4m3, normal numbers). Bytes: qkv read once, q and the cache's entries written once."""
    query_heads, kv_heads, size = heads
    tokens = qkv.shape[0]
    q = qkv.new_empty(tokens, query_heads, size)
    form = _FORMATS[cache.layout.name]
    k, v = (cache.tensors[name] for name in ("k", "v"))
    if form:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    rotate_and_write[(tokens, triton.cdiv(query_heads + 2 * kv_heads, _HEADS))](
        qkv,
        positions,
        None if rope is None else rope.cos,
        None if rope is None else rope.sin,
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        write_index,
        q,
        k,
        v,
        cache.tensors["k_scale"] if form else None,
        cache.tensors["v_scale"] if form else None,
        qkv.stride(0),
        0 if rope is None else rope.cos.stride(0),
        1.0 if q_norm is None else q_norm.eps,
        0.0 if q_norm is None else q_norm.offset,
        1.0 if k_norm is None else k_norm.eps,
        0.0 if k_norm is None else k_norm.offset,
        H=query_heads,
        K=kv_heads,
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
        TURNING=0 if rope is None else 2 * rope.cos.shape[1],
        HEADS=_HEADS,
        PAGE=cache.page_size,
        INTERLEAVED=rope is not None and rope.interleaved,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        Q_ROUND_FIRST=q_norm is not None and q_norm.round_first,
        K_ROUND_FIRST=k_norm is not None and k_norm.round_first,
        FORMAT=form,
        PDL=launcher.pdl,
        num_warps=4,
        **launcher.options,
    )
    return q
