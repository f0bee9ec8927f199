"""What FlashDecoding's kernels do to single tiles: find and load them, widen eight bits, drop what may not be read."""

from __future__ import annotations

import triton
import triton.language as tl

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
        E4M3: tl.constexpr = WIDEN_E4M3_FINITE if FINITE else WIDEN_E4M3
        CODE: tl.constexpr = WIDEN_INT8 if FORMAT == 1 else WIDEN_E4M3_BITS if FORMAT == 2 else E4M3
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
def page_of(table, start, offsets, pages, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PAST_L1: tl.constexpr):
    """The page id of the tile at `start`, or of each of its entries."""
    CACHE: tl.constexpr = ".cg" if PAST_L1 else ""
    if PAGE >= BLOCK_N:
        page = tl.load(table + start // PAGE, cache_modifier=CACHE)
    else:
        index = (start + offsets) // PAGE
        page = tl.load(table + index, mask=index < pages, other=0, cache_modifier=CACHE)
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
