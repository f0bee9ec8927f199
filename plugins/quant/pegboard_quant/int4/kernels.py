"""Products with tiles of 4-bit weights. W is the left operand: Y^T = W X^T.

Letters: M rows of x, N outputs, K inputs; a tile has 128 columns. See `layout` for the order of codes."""

from __future__ import annotations

import triton
import triton.language as tl

from .adding import finish
from .unpacking import less_zero, times_scale, unpack_words

FETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.jit
def _load_steps(steps, tile, NP, n, GROUP_TILES, PARTS: tl.constexpr, part):
    group = tile * PARTS + part if PARTS > 1 else tile // GROUP_TILES
    return tl.load(steps + group * NP + n)


@triton.jit
def _scale_of(step, SCALE: tl.constexpr):
    return (step & 0xFFFF).to(tl.int16).to(SCALE, bitcast=True)


@triton.jit
def _offset_of(step, SCALE: tl.constexpr):
    return (step >> 16).to(tl.int16).to(SCALE, bitcast=True)


@triton.jit
def _rounded(
    w, steps, tile, NP, n, PARTS: tl.constexpr, SCALE: tl.constexpr, SHIFTED: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Weights of several groups [BN, 128], rounded to the dtype of codes. A product for each group, as else, would
    need parts of w, and those come out wrong where Hopper's `wgmma` takes W from registers (triton 3.6)."""
    k = tl.arange(0, 128)
    step = _load_steps(steps, tile, NP, n, 1, PARTS, 0)[:, None]
    for part in tl.static_range(1, PARTS):
        other = _load_steps(steps, tile, NP, n, 1, PARTS, part)[:, None]
        step = tl.where(k[None, :] >= part * (128 // PARTS), other, step)
    if SHIFTED:
        codes = less_zero(w, step * 0, ASM).to(tl.float32)
        return (codes * _scale_of(step, SCALE).to(tl.float32) + _offset_of(step, SCALE).to(tl.float32)).to(w.dtype)
    return times_scale(less_zero(w, step >> 16, ASM), _scale_of(step, SCALE), ASM)


@triton.jit
def _load_words(words, tile_row, tile, TILES, inner, BN: tl.constexpr):
    """Words of half a tile or a tile, as `unpack_words` wants them."""
    at = words + (tile_row * TILES + tile).to(tl.int64) * 2048 + inner * 1024
    return tl.load(at + tl.arange(0, BN * 16), eviction_policy="evict_first")


@triton.jit
def _fetch(words, tile_row, first, count, TILES, inner, BN: tl.constexpr, FETCHED: tl.constexpr):
    """Asks the L2 for the words of the first tiles: lines of 128 bytes."""
    LINES: tl.constexpr = BN // 2
    line = tl.arange(0, LINES * FETCHED)
    tile = first + tl.minimum(line // LINES, count - 1)
    at = words + (tile_row * TILES + tile).to(tl.int64) * 2048 + inner * 1024 + line % LINES * 32
    tl.inline_asm_elementwise(FETCH, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load_x(x_at, k, K, rows, EVEN: tl.constexpr):
    """x^T of some columns, [columns, M]; 0 beyond the last."""
    if EVEN:
        return tl.load(x_at, mask=rows[None, :], other=0.0)
    return tl.load(x_at, mask=rows[None, :] & (k[:, None] < K), other=0.0)


@triton.jit(do_not_specialize=["M", "TILES", "TILES_A_PART"])
def multiply_rows(
    words, steps, x, bias, out, partial, counters, M, N, K, NP, OUT_STRIDE, TILES, TILES_A_PART, GROUP_TILES,
    BN: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, SCALE: tl.constexpr,
    SHIFTED: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr, COPIED: tl.constexpr, STAGES: tl.constexpr,
    FETCHED: tl.constexpr, EARLY: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, HEAD: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """A program takes BN outputs and BM rows of x, 16 at least, with which Hopper takes `wgmma` with W in registers.
    Words and x are staged in shared memory, several tiles ahead, x by bulk copies where COPIED, from a descriptor; the
    unpacked weight never is. With HEAD, the sums of all but the first WHOLE of BLOCKS are made by two programs, of HEAD
    tiles and of the others; these come last, for multiprocessors with less to do.
    Bytes: the weight once for every BM rows. Limit: streaming read up to about 32 rows, then unpacking."""
    block, part = tl.program_id(0), tl.program_id(1)
    parts = SPLIT
    first = part * TILES_A_PART
    count = tl.minimum(TILES_A_PART, TILES - first)
    if HEAD > 0:
        tail = block >= BLOCKS
        parts = tl.where(block < WHOLE, 1, 2)
        part = tail.to(tl.int32)
        first = tl.where(tail, HEAD, 0)
        count = tl.where(block < WHOLE, TILES, tl.where(tail, TILES - HEAD, HEAD))
        block = tl.where(tail, block - BLOCKS + WHOLE, block)
    m, n = tl.program_id(2) * BM + tl.arange(0, BM), block * BN + tl.arange(0, BN)
    tile_row = (block * BN) // 128
    inner = block % (128 // BN) if BN < 128 else 0
    rows = m < M
    k = tl.arange(0, 128)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if FETCHED > 0:
        _fetch(words, tile_row, first, count, TILES, inner, BN, FETCHED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not COPIED:
        x_at = x + m[None, :].to(tl.int64) * K + (first * 128 + k)[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        packed = _load_words(words, tile_row, first + i, TILES, inner, BN)
        w = unpack_words(packed, DTYPE, BN, ASM)
        if COPIED:
            xs = x.load([tl.program_id(2) * BM, (first + i) * 128]).T
        else:
            xs = _load_x(x_at + i * 128, (first + i) * 128 + k, K, rows, EVEN)
        if PARTS == 1:
            step = _load_steps(steps, first + i, NP, n, GROUP_TILES, PARTS, 0)
            product = tl.dot(less_zero(w, step >> 16, ASM), xs, input_precision="ieee")
            total += product * _scale_of(step, SCALE).to(tl.float32)[:, None]
        else:
            rounded = _rounded(w, steps, first + i, NP, n, PARTS, SCALE, SHIFTED, ASM)
            total += tl.dot(rounded, xs, input_precision="ieee")
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    finish(
        total, bias, out, partial, counters, m, n, M, N, OUT_STRIDE, block, part, parts,
        BLOCKS, BN, BM, SPLIT, HEAD > 0, SPREAD, BIAS, ADDS,
    )  # fmt: skip


@triton.jit
def dequantise_tiles(
    words, steps, dense, N, K, NP, TILES, GROUP_TILES,
    BN: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr, SHIFTED: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The weight [N, K] in the dtype of activations, rounded once. A program makes BN rows of a tile."""
    block, tile = tl.program_id(0), tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    packed = _load_words(words, (block * BN) // 128, tile, TILES, block % (128 // BN), BN)
    k = tl.arange(0, 128)
    group = (tile * PARTS + k // (128 // PARTS)) if PARTS > 1 else tile // GROUP_TILES + k * 0
    step = tl.load(steps + group[None, :] * NP + n[:, None])
    scale = (step & 0xFFFF).to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)
    zero = step * 0 if SHIFTED else step >> 16
    w = less_zero(unpack_words(packed, dense.dtype.element_ty, BN, ASM), zero, ASM).to(tl.float32) * scale
    if SHIFTED:
        w += _offset_of(step, SCALE).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    column = tile * 128 + k
    dense_at = dense + n[:, None].to(tl.int64) * K + column[None, :]
    mask = (n[:, None] < N) & (column[None, :] < K)
    tl.store(dense_at, w.to(dense.dtype.element_ty), mask=mask)
