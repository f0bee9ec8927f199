"""What FlashDecoding's kernels do to single tiles: find and load them, drop what may not be read."""

from __future__ import annotations

import triton
import triton.language as tl


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
