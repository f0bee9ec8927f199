"""Products of up to 16 rows with tiles of 4-bit weights: words go from memory through registers into `wgmma`.

Letters: M rows of x, N outputs, K inputs; see `layout` for the order of codes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .registers import left_codes, less_zero, scale_of, store_sums
from .renamed import copy_in, reinterpret


def _nibbles() -> str:
    """Four words -> eight registers of four bytes each: a word's lower halves of bytes, then its upper ones."""
    lines = [".reg .b32 t;"]
    for word in range(4):
        lines.append(f"and.b32 ${2 * word}, ${8 + word}, 0x0F0F0F0F;")
        lines.append(f"shr.u32 t, ${8 + word}, 4;")
        lines.append(f"and.b32 ${2 * word + 1}, t, 0x0F0F0F0F;")
    return "{\n" + "\n".join(lines) + "\n}"


_NIBBLES = gl.constexpr(_nibbles())
_NIBBLES_CONSTRAINTS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")


@gluon.jit
def _left_bytes(words, BN: gl.constexpr, LEFT: gl.constexpr):
    """Words [2, BN / 64, 512] -> codes [BN, 128], columns in the order of `digits`: n1 n2 w2 w3 n0 w1 w9, lowest bit
    first. The assembly takes four neighbours, w0 and w1, but what it calls their results are a word's four bytes."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _NIBBLES, _NIBBLES_CONSTRAINTS, [words],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip
    codes = gl.join(gl.join(gl.join(a, e), gl.join(c, g)), gl.join(gl.join(b, f), gl.join(d, h)))
    # Bits: w9, all rows from 64 on, w8 to w2, n2, n1, w1, w0, n0
    codes = gl.reshape(codes, [2, BN // 64, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    codes = gl.permute(codes, [1, 2, 3, 12, 4, 5, 6, 0, 11, 13, 7, 8, 9, 10])
    return gl.convert_layout(gl.reshape(codes, [BN, 128]), LEFT, assert_trivial=True)


@gluon.jit
def _ask(words, steps, part, tile, NP, GROUP_TILES):
    """Loads words and steps of a part's tile; the last's again where there are no more."""
    first, count = part
    tile = gl.minimum(tile, count - 1)
    packed = gl.load(words + tile * 2048, eviction_policy="evict_first")
    return packed, gl.load(steps + (first + tile) // GROUP_TILES * NP)


@gluon.jit
def _copy(x, part, chunk, memory, DEPTH: gl.constexpr, COPIED: gl.constexpr, DIGITS: gl.constexpr):
    """Begins to copy COPIED tiles of x, or of its digits, to the buffer that is their turn, if the part has them."""
    tiles, full = memory
    first, count = part
    slot = chunk % full.shape[0]
    tile = chunk * COPIED
    # All of a body, though beyond the part
    there = tile < (count + DEPTH - 1) // DEPTH * DEPTH
    tile += first
    if DIGITS:
        ROWS: gl.constexpr = COPIED * tiles.shape[1]
        mbarrier.expect(full.index(slot), ROWS * 128, pred=there)
        into = reinterpret(tiles, gl.int8, [full.shape[0], ROWS, 128], x.layout).index(slot)
        copy_in(x, [tile * tiles.shape[1], 0], full.index(slot), into, pred=there)
    else:
        mbarrier.expect(full.index(slot), COPIED * tiles.shape[1] * 256, pred=there)
        for i in gl.static_range(COPIED):
            into = tiles.index(slot * COPIED + i)
            copy_in(x, [0, (tile + i) * 128], full.index(slot), into, pred=there)


@gluon.jit(do_not_specialize=["M", "TILES", "TILES_A_PART"])
def multiply_streamed(
    words, steps, x, factors, bias, out, partial, counters, M, N, NP, OUT_STRIDE, TILES, TILES_A_PART, GROUP_TILES,
    BN: gl.constexpr, BM: gl.constexpr, SPLIT: gl.constexpr, DEPTH: gl.constexpr, COPIED: gl.constexpr,
    STAGES: gl.constexpr, DIGITS: gl.constexpr, PART: gl.constexpr, WHOLE: gl.constexpr, SCALE: gl.constexpr,
    BIAS: gl.constexpr, ADDS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A program makes BN outputs of BM rows, a warpgroup 64 of the outputs. Words are asked for DEPTH tiles ahead, from
    before the wait for x, and wait in registers; x comes by bulk copies of COPIED tiles, STAGES of them in flight.
    Shared memory is little on purpose: words in flight lie in the rest of it, the L1. PART: tiles of a part, or more, a
    power of 2; WHOLE: parts have no rests.

    With DIGITS codes are multiplied as 8-bit integers, which unpacking makes of eight codes in three instructions, not
    eleven: by both digits of x, side by side (`digits`), and by the factors of its tiles.
    Bytes: the weight once, x once for every BN outputs. Limit: streaming read."""
    INT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 2 * BM, 32])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, INT, 4) if DIGITS else gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([2, 1, 4], [1, 1, 32], [1, num_warps // 4, 4], [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KEPT: gl.constexpr = STAGES * COPIED >= PART
    block, part = gl.program_id(0), gl.program_id(1)
    first = part * TILES_A_PART
    count = gl.minimum(TILES_A_PART, TILES - first)
    if PDL:
        gdc_launch_dependents()
    tiles = gl.allocate_shared_memory(x.dtype, [STAGES * COPIED, 2 * BM if DIGITS else BM, 128], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    memory = (tiles, full)

    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    below = gl.arange(0, BN // 64, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    place = gl.arange(0, 512, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    # Of rows, 64 are half a tile
    below += block * (BN // 64)
    words += ((below // 2 * TILES).to(gl.int64) * 2048 + below % 2 * 1024)[None, :, None]
    words += first * 2048 + half[:, None, None] * 512 + place[None, None, :]
    n = block * BN + gl.arange(0, BN, gl.SliceLayout(1, MMA))
    steps += n
    held = ()
    for d in gl.static_range(DEPTH):
        held = held + (_ask(words, steps, (first, count), d, NP, GROUP_TILES),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_wait()
    for s in gl.static_range(STAGES):
        _copy(x, (first, count), s, memory, DEPTH, COPIED, DIGITS)
    flat = gl.allocate_shared_memory(gl.float32, [PART * 2 * BM if DIGITS else BM], PLAIN)
    if DIGITS:
        at = gl.arange(0, PART * 2 * BM, gl.BlockedLayout([4], [32], [num_warps], [0]))
        flat.store(gl.load(factors + first * (2 * BM) + at, mask=at < count * (2 * BM), other=0.0))
        debug_barrier()
    of_rows = reinterpret(flat, gl.float32, [PART * 2 if DIGITS else 1, BM], PLAIN)

    total = gl.zeros([BN, BM], gl.float32, MMA)
    CHUNKS: gl.constexpr = DEPTH // COPIED
    for body in range((count + DEPTH - 1) // DEPTH):
        later = ()
        packed, step = held[0]  # type: ignore[misc]
        for d in gl.static_range(DEPTH):
            tile = body * DEPTH + d
            chunk = body * CHUNKS + d // COPIED
            slot = chunk % STAGES
            if DIGITS:
                left = _left_bytes(packed, BN, LEFT)
                zeros = warpgroup_mma_init(gl.zeros([BN, 2 * BM], gl.int32, INT))
            else:
                zero = gl.convert_layout(step >> 16, gl.SliceLayout(1, LEFT), assert_trivial=True)
                left = less_zero(left_codes(packed, BN, LEFT, x.dtype), gl.expand_dims(zero, 1))
                zeros = warpgroup_mma_init(gl.zeros([BN, BM], gl.float32, MMA))
            if d % COPIED == 0:
                mbarrier.wait(full.index(slot), chunk // STAGES & 1)
            right = tiles.index(slot * COPIED + d % COPIED).permute((1, 0))
            queued = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
            later = later + (_ask(words, steps, (first, count), tile + DEPTH, NP, GROUP_TILES),)  # type: ignore[assignment]  # noqa: RUF005
            # The left operand is read until the wait: words that are unpacked next go through it, too
            following, next_step = held[d + 1] if d + 1 < DEPTH else later[0]  # type: ignore[misc]
            scale = scale_of(step, SCALE).to(gl.float32)
            if DIGITS:
                factor = of_rows.index(2 * tile).load(gl.SliceLayout(0, MMA))
                summed = of_rows.index(2 * tile + 1).load(gl.SliceLayout(0, MMA))
                found, following = warpgroup_mma_wait(0, deps=[queued, following])
                high, low = gl.split(gl.permute(gl.reshape(found, [BN, 2, BM]), [0, 2, 1]))
                y = gl.convert_layout((high * 256 + low).to(gl.float32), MMA, assert_trivial=True)
                zero = (step >> 16).to(gl.float32)
                total += (y * factor[None, :] - zero[:, None] * summed[None, :]) * scale[:, None]
            else:
                found, following, _ = warpgroup_mma_wait(0, deps=[queued, following, left])
                if not WHOLE:
                    found = gl.where(tile < count, found, 0.0)
                total += found * scale[:, None]
            packed, step = following, next_step
            if d % COPIED == COPIED - 1 and not KEPT:
                debug_barrier()
                _copy(x, (first, count), chunk + STAGES, memory, DEPTH, COPIED, DIGITS)
        held = later
    m = gl.arange(0, BM, gl.SliceLayout(0, MMA))
    if SPLIT == 1:
        store_sums(total, n, m, bias, out, M, N, OUT_STRIDE, BIAS, ADDS)
    else:
        size = gl.num_programs(0) * (BN * BM)
        at = partial + block * (BN * BM) + gl.arange(0, BN, gl.SliceLayout(1, MMA))[:, None] * BM + m[None, :]
        gl.store(at + part * size, total)
        debug_barrier()
        arrived = gl.atomic_add(counters + block, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            total = gl.zeros([BN, BM], gl.float32, MMA)
            for s in gl.static_range(SPLIT):
                total += gl.load(at + s * size, cache_modifier=".cg")
            store_sums(total, n, m, bias, out, M, N, OUT_STRIDE, BIAS, ADDS)
            gl.store(counters + block, 0)
