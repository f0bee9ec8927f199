"""Products of up to 16 rows with tiles of 4-bit weights: x stays in shared memory, and warps don't wait for each other.

Letters: M rows of x, N outputs, K inputs; see `layout` for the order of codes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .registers import scale_of, unpack_words


@gluon.jit
def _left(words, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """[KW, NW, 2, 128] words -> codes plus B [KW, 16 NW, 128]."""
    KW: gl.constexpr = words.shape[0]
    NW: gl.constexpr = words.shape[1]
    codes = unpack_words(words, DTYPE)
    # Bits: w9, w6 to w1, n2, w0, n1, n0; see `layout`
    codes = gl.reshape(codes, [KW, NW, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    codes = gl.permute(codes, [0, 1, 10, 3, 4, 5, 2, 8, 11, 12, 6, 7, 9])
    return gl.convert_layout(gl.reshape(codes, [KW, NW * 16, 128]), LEFT, assert_trivial=True)


@gluon.jit
def _ask(words, steps, turn, NP, GROUP_TILES, first, count, KW: gl.constexpr, WORDS: gl.constexpr, STEP: gl.constexpr):
    """Loads words and steps of each warp's tile of a turn: ([KW, NW, 2, 128], [KW, 16 NW])."""
    tile = turn * KW + gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    packed = gl.load(words + gl.minimum(tile, count - 1)[:, None, None, None] * 2048, eviction_policy="evict_first")
    tile = turn * KW + gl.arange(0, KW, gl.SliceLayout(1, STEP))
    group = (first + gl.minimum(tile, count - 1)) // GROUP_TILES
    return packed, gl.load(steps + (group * NP)[:, None])


@gluon.jit
def _copy(xs, x, first, count, M, K, num_warps: gl.constexpr):
    """x's columns of tiles from the first on, to xs [tiles, rows, 128]; the last again where there are no more."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [num_warps // 2, 2, 1], [2, 1, 0])
    m = gl.minimum(gl.arange(0, xs.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, ROWS))), M - 1)
    k = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))
    for t in gl.static_range(xs.shape[0] // num_warps):
        tile = t * num_warps + gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))
        column = (first + gl.minimum(tile, count - 1)) * 128
        at = x + m.to(gl.int64)[None, :, None] * K + (column[:, None, None] + k[None, None, :])
        async_copy.async_copy_global_to_shared(xs.slice(t * num_warps, num_warps, 0), at)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _add_up(xs, sums, num_warps: gl.constexpr):
    """The sums of a tile's columns, for each row of x, to sums [tiles, rows]: products with ones."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    COLUMNS: gl.constexpr = xs.shape[1]
    ones = gl.full([num_warps, 16, 128], 1.0, xs.dtype, gl.DotOperandLayout(0, MMA, 2))
    for t in gl.static_range(xs.shape[0] // num_warps):
        right = xs.slice(t * num_warps, num_warps, 0).permute((0, 2, 1)).load(gl.DotOperandLayout(1, MMA, 2))
        found = mma_v2(ones, right, gl.zeros([num_warps, 16, COLUMNS], gl.float32, MMA))
        sums.slice(t * num_warps, num_warps, 0).store(gl.max(found, 1))


@gluon.jit
def _store(y, n, m, bias, out, M, N, OUT_STRIDE, BIAS: gl.constexpr, ADDS: gl.constexpr):
    """y [outputs, rows] with the bias, with ADDS to what `out` holds."""
    if BIAS:
        y += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    there = (n < N)[:, None] & (m < M)[None, :]
    out_at = out + m[None, :].to(gl.int64) * OUT_STRIDE + n[:, None]
    if ADDS:
        y += gl.load(out_at, mask=there, other=0.0).to(gl.float32)
    gl.store(out_at, y.to(out.dtype.element_ty), mask=there)


@gluon.jit(do_not_specialize=["M"])
def multiply_resident(
    words, steps, x, bias, out, partial, counters, M, N, K, NP, OUT_STRIDE, GROUP_TILES, TILES, BLOCKS,
    PART: gl.constexpr, HELD: gl.constexpr, KW: gl.constexpr, NW: gl.constexpr, COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr, WHOLE: gl.constexpr, SPLIT: gl.constexpr, SCALE: gl.constexpr, BIAS: gl.constexpr,
    ADDS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A warp makes 16 outputs of all rows by turns of a tile of inputs; KW warps, and SPLIT programs, share the inputs
    of a block of outputs, and NW blocks are beside each other. K is of whole tiles, PART of them a program, which has
    memory for HELD, a power of 2; WHOLE says that parts and turns have no rests.

    Words go from memory into registers, DEPTH turns ahead, from before the wait for x. Zero points, and what unpacking
    adds, are taken away times the sum of x: in float32, before the codes' product is added. Bytes: the weight once, x
    once a program. Limit: unpacking."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [KW, NW, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    STEP: gl.constexpr = gl.SliceLayout(2, MMA)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 2, 4], [1, 1, 1, 32], [KW, NW, 1, 1], [3, 2, 1, 0])
    SHARED: gl.constexpr = gl.BlockedLayout([KW, 1, 1], [1, 16, 2], [1, NW, KW], [1, 2, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, SHARED)
    DTYPE: gl.constexpr = x.dtype.element_ty
    BASE: gl.constexpr = 128 if DTYPE == gl.bfloat16 else 1024  # noqa: SIM300 - a constexpr stands for a type
    TURNS: gl.constexpr = (PART + KW - 1) // KW
    slot, part, slots = gl.program_id(0), gl.program_id(1), gl.num_programs(0)
    first = part * PART
    count = gl.minimum(PART, TILES - first)
    if PDL:
        gdc_launch_dependents()
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    xs = gl.allocate_shared_memory(DTYPE, [HELD, COLUMNS, 128], SWIZZLED)
    sums = gl.allocate_shared_memory(gl.float32, [HELD, COLUMNS], PLAIN)
    xs_of = xs._reinterpret(DTYPE, [HELD // KW, KW, COLUMNS, 128], SWIZZLED)
    sums_of = sums._reinterpret(gl.float32, [HELD // KW, KW, COLUMNS], PLAIN)

    beside = gl.arange(0, NW, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS))))
    place = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))))
    words += first.to(gl.int64) * 2048 + (half[None, None, :, None] * 512 + place[None, None, None, :])
    i = gl.arange(0, NW * 16, gl.SliceLayout(0, STEP))
    y_i, y_m = gl.arange(0, NW * 16, gl.SliceLayout(1, OUT)), gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    within = y_m[None, :] * 16 + (y_i % 16)[:, None]
    rounds = (BLOCKS - slot + slots * NW - 1) // (slots * NW)
    for r in range(rounds):
        block = gl.minimum((r * NW + beside) * slots + slot, BLOCKS - 1)
        # Of a row, bits 4 and 5 are those of words of 128 and 256, bit 6 that of 1024; see `layout`
        row_at = (block // 8).to(gl.int64) * (TILES * 2048) + (block % 4 * 128 + block // 4 % 2 * 1024)
        words_at = words + row_at[None, :, None, None]
        steps_at = steps + (gl.minimum((r * NW + i // 16) * slots + slot, BLOCKS - 1) * 16 + i % 16)[None, :]
        held = ()
        for d in gl.static_range(DEPTH):
            held = held + (_ask(words_at, steps_at, d, NP, GROUP_TILES, first, count, KW, WORDS, STEP),)  # type: ignore[assignment]  # noqa: RUF005
        if r == 0:
            if PDL:
                gdc_wait()
            _copy(xs, x, first, count, M, K, num_warps)
            _add_up(xs, sums, num_warps)
        debug_barrier()
        total = gl.zeros([KW, NW * 16, COLUMNS], gl.float32, MMA)
        for start in range(0, TURNS, DEPTH):
            later = ()
            for d in gl.static_range(DEPTH):
                packed, step = held[d]  # type: ignore[var-annotated]
                w = _left(packed, DTYPE, LEFT)
                later = later + (  # type: ignore[assignment]  # noqa: RUF005
                    _ask(words_at, steps_at, start + d + DEPTH, NP, GROUP_TILES, first, count, KW, WORDS, STEP),
                )
                turn = start + d if WHOLE else gl.minimum(start + d, TURNS - 1)
                sum_ = sums_of.index(turn).load(gl.SliceLayout(1, MMA))
                less = (-BASE - (step >> 16)).to(gl.float32)
                product = mma_v2(
                    w, xs_of.index(turn).permute((0, 2, 1)).load(RIGHT), less[:, :, None] * sum_[:, None, :]
                )
                scale = scale_of(step, SCALE).to(gl.float32)
                if not WHOLE:
                    tile = (start + d) * KW + gl.arange(0, KW, gl.SliceLayout(1, STEP))
                    scale = gl.where((tile < count)[:, None], scale, 0.0)
                total += product * scale[:, :, None]
            held = later
        y = gl.sum(gl.convert_layout(total, SHARED), 0)
        y_block = (r * NW + y_i // 16) * slots + slot
        if SPLIT == 1:
            _store(y, y_block * 16 + y_i % 16, y_m, bias, out, M, N, OUT_STRIDE, BIAS, ADDS)
        else:
            at = partial + (part * BLOCKS + y_block)[:, None] * (16 * COLUMNS) + within
            gl.store(at, y, mask=(y_block < BLOCKS)[:, None] & (y_m < M)[None, :])
    if SPLIT > 1:
        debug_barrier()
        arrived = gl.atomic_add(counters + slot, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            for r in range(rounds):
                y_block = (r * NW + y_i // 16) * slots + slot
                there = (y_block < BLOCKS)[:, None] & (y_m < M)[None, :]
                y = gl.zeros([NW * 16, COLUMNS], gl.float32, OUT)
                for s in gl.static_range(SPLIT):
                    at = partial + (s * BLOCKS + y_block)[:, None] * (16 * COLUMNS) + within
                    y += gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
                _store(y, y_block * 16 + y_i % 16, y_m, bias, out, M, N, OUT_STRIDE, BIAS, ADDS)
            gl.store(counters + slot, 0)
