"""Norms by head, rotary embedding and the write into the cache, in one launch, or two where many values are turned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from pegboard.dtypes import FLOAT_DTYPES

from .eight_bits import eight_bits, scale_of
from .value_writing import launch_value_write

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.contracts.attention import KVLayout, LayerCache
    from pegboard.contracts.ops import Norm, Rope

    from .launching import Launcher

#: Layout name -> how it is written: as it is, in offset binary, as e4m3 bits.
_FORMATS: Final = {"nhd": 0, "hnd-int8": 1, "hnd-float8_e4m3fn": 2}
_NAMES: Final = {"nhd": ("k", "v")} | dict.fromkeys(("hnd-int8", "hnd-float8_e4m3fn"), ("k", "v", "k_scale", "v_scale"))
#: Heads a program: of many tokens without norms more, which costs fewer registers there than it saves launches.
_HEADS, _MANY_HEADS = 8, 16
#: Tokens from which on turned values have a launch of their own. Fewer are of decode rows, each in another page.
_APART = 256


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
    """x [HEADS, PAIRS] of the dtype of `weight`'s products, rounded as the reference rounds."""
    scaled = x.to(tl.float32) * rms
    if ROUND_FIRST:
        out = (scaled.to(x.dtype).to(tl.float32) * weight.to(x.dtype).to(tl.float32)).to(x.dtype)
    else:
        out = (scaled * weight).to(x.dtype)
    return out


@triton.jit
def head_normed(
    x,
    rms,
    q_weight,
    k_weight,
    is_q,
    is_k,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    Q_ROUND_FIRST: tl.constexpr,
    K_ROUND_FIRST: tl.constexpr,
):
    """x with its head's norm, or as it is. Where both norms round alike they are one, with a weight chosen by head."""
    if Q_NORM and K_NORM and Q_ROUND_FIRST == K_ROUND_FIRST:
        weight = tl.where(is_q, q_weight, k_weight)
        x = tl.where(is_q | is_k, normed(x, rms, weight, Q_ROUND_FIRST), x)
    else:
        if Q_NORM:
            x = tl.where(is_q, normed(x, rms, q_weight, Q_ROUND_FIRST), x)
        if K_NORM:
            x = tl.where(is_k, normed(x, rms, k_weight, K_ROUND_FIRST), x)
    return x


@triton.jit
def load_weight(weight_ptr, d, offset, D: tl.constexpr):
    return (tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32) + offset)[None, :]


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
    PAIRS: tl.constexpr,
    TURNING: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    Q_ROUND_FIRST: tl.constexpr,
    K_ROUND_FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens, blocks of HEADS among q, k and, with VALUES, v heads). TURNING: dimensions that turn, 0 for none.

    A head is held as the PAIRS of numbers that turn together, a and b, so that each is loaded and normed once; what
    does not turn is paired anyhow."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    head = first_head + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    HALF: tl.constexpr = TURNING // 2
    COUNT: tl.constexpr = (D + 1) // 2
    ENDS: tl.constexpr = H + 2 * K if VALUES else H + K
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    elif TURNING == 0 or TURNING == D:
        first = pair
        second = pair + COUNT
    else:
        first = tl.where(pair < HALF, pair, pair + HALF)
        second = first + tl.where(pair < HALF, HALF, COUNT - HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
    in_a = (head < ENDS)[:, None] & (pair < COUNT)[None, :]
    in_b = in_a & (second < D)[None, :]
    is_q, is_k = (head < H)[:, None], ((head >= H) & (head < H + K))[:, None]
    at = qkv_ptr + token * qkv_row + (head * D)[:, None]
    a = tl.load(at + first[None, :], mask=in_a, other=0.0)
    b = tl.load(at + second[None, :], mask=in_b, other=0.0)
    index = tl.load(index_ptr + token)
    if Q_NORM or K_NORM:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        eps = tl.where(head < H, q_eps, k_eps)
        rms = tl.rsqrt(tl.sum(wide_a * wide_a + wide_b * wide_b, 1) / D + eps)[:, None]
        q_weight_a, q_weight_b, k_weight_a, k_weight_b = 0.0, 0.0, 0.0, 0.0
        if Q_NORM:
            q_weight_a = load_weight(q_weight_ptr, first, q_offset, D)
            q_weight_b = load_weight(q_weight_ptr, second, q_offset, D)
        if K_NORM:
            k_weight_a = load_weight(k_weight_ptr, first, k_offset, D)
            k_weight_b = load_weight(k_weight_ptr, second, k_offset, D)
        a = head_normed(
            a, rms, q_weight_a, k_weight_a, is_q, is_k, Q_NORM, K_NORM, Q_ROUND_FIRST, K_ROUND_FIRST
        )  # fmt: skip
        b = head_normed(
            b, rms, q_weight_b, k_weight_b, is_q, is_k, Q_NORM, K_NORM, Q_ROUND_FIRST, K_ROUND_FIRST
        )  # fmt: skip
    if TURNING:
        row = tl.load(positions_ptr + token) * rope_row
        cos = tl.load(cos_ptr + row + pair, mask=pair < HALF, other=1.0)[None, :]
        sin = tl.load(sin_ptr + row + pair, mask=pair < HALF, other=0.0)[None, :]
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = tl.where(is_q | is_k, (wide_a * cos - wide_b * sin).to(a.dtype), a)
        b = tl.where(is_q | is_k, (wide_b * cos + wide_a * sin).to(b.dtype), b)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    q_at = q_ptr + token * (H * D) + (head * D)[:, None]
    tl.store(q_at + first[None, :], a, mask=in_a & is_q)
    tl.store(q_at + second[None, :], b, mask=in_b & is_q)

    if first_head + HEADS > H:
        is_v = head >= H + K
        kv_head = tl.where(is_v, head - H - K, head - H)
        if FORMAT == 0:
            entry = index * (K * D) + (kv_head * D)[:, None]
            tl.store(k_ptr + entry + first[None, :], a.to(k_ptr.dtype.element_ty), mask=in_a & is_k)
            tl.store(k_ptr + entry + second[None, :], b.to(k_ptr.dtype.element_ty), mask=in_b & is_k)
            tl.store(v_ptr + entry + first[None, :], a.to(v_ptr.dtype.element_ty), mask=in_a & is_v[:, None])
            tl.store(v_ptr + entry + second[None, :], b.to(v_ptr.dtype.element_ty), mask=in_b & is_v[:, None])
        else:
            wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
            scale = scale_of(tl.max(tl.maximum(tl.abs(wide_a), tl.abs(wide_b)), 1), FORMAT)
            code_a = eight_bits(wide_a, scale[:, None], FORMAT)
            code_b = eight_bits(wide_b, scale[:, None], FORMAT)
            in_page = index // PAGE * K + kv_head
            inside = index % PAGE
            k_at = k_ptr + (in_page * (PAGE * D) + inside * D)[:, None]
            tl.store(k_at + first[None, :], code_a, mask=in_a & is_k)
            tl.store(k_at + second[None, :], code_b, mask=in_b & is_k)
            tl.store(k_scale_ptr + in_page * PAGE + inside, scale, mask=(head >= H) & (head < H + K))
            if VALUES:
                v_at = v_ptr + (in_page * (PAGE * D) + inside)[:, None]
                tl.store(v_at + (first * PAGE)[None, :], code_a, mask=in_a & is_v[:, None])
                tl.store(v_at + (second * PAGE)[None, :], code_b, mask=in_b & is_v[:, None])
                tl.store(v_scale_ptr + in_page * PAGE + inside, scale, mask=is_v & (head < ENDS))


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
        import torch  # not for those who compile the kernel

        k, v = k.view(torch.uint8), v.view(torch.uint8)
    apart = bool(form) and tokens >= _APART
    block = _MANY_HEADS if tokens >= 1024 and q_norm is None and k_norm is None else _HEADS
    rotate_and_write[(tokens, triton.cdiv(query_heads + (1 if apart else 2) * kv_heads, block))](
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
        PAIRS=triton.next_power_of_2((size + 1) // 2),
        TURNING=0 if rope is None else 2 * rope.cos.shape[1],
        HEADS=block,
        PAGE=cache.page_size,
        INTERLEAVED=rope is not None and rope.interleaved,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        Q_ROUND_FIRST=q_norm is not None and q_norm.round_first,
        K_ROUND_FIRST=k_norm is not None and k_norm.round_first,
        FORMAT=form,
        VALUES=not apart,
        PDL=launcher.pdl,
        num_warps=4,
        **launcher.options,
    )
    if apart:
        values = qkv.narrow(1, (query_heads + kv_heads) * size, kv_heads * size)
        launch_value_write(values, v, cache.tensors["v_scale"], write_index, form, launcher)
    return q
