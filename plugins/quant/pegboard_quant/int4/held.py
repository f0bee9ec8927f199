"""Products of one to four rows with tiles of 4-bit weights: words wait in registers for x.

Letters: M rows of x, N outputs, K inputs; see `layout` for the order of codes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .registers import less_zero, scale_of, store_sums, unpack_words

#: Two numbers of the first or of the second, by a flag that is the same for both
_CHOOSE = gl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; selp.b32 $0, $1, $2, p; }")


@gluon.jit
def _left(words, step, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, LEFT: gl.constexpr):
    """[warps, 2, 8 BLOCK_N] words -> codes less zero points [warps, BLOCK_N, 128], inputs as in `_ordered`."""
    WARPS: gl.constexpr = words.shape[0]
    codes = unpack_words(words, DTYPE)
    # Bits: w9, those of a place in a row of words, and (low bit of a word's, n1, n0)
    if BLOCK_N == 16:
        codes = gl.reshape(codes, [WARPS, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
        codes = gl.permute(codes, [0, 9, 2, 3, 4, 1, 7, 5, 6, 10, 11, 8])
    else:
        gl.static_assert(BLOCK_N == 32)
        codes = gl.reshape(codes, [WARPS, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
        codes = gl.permute(codes, [0, 2, 10, 3, 4, 5, 1, 8, 6, 7, 11, 12, 9])
    codes = gl.convert_layout(gl.reshape(codes, [WARPS, BLOCK_N, 128]), LEFT, assert_trivial=True)
    return less_zero(codes, gl.expand_dims(step >> 16, 2))


@gluon.jit
def _ordered(x, WARPS: gl.constexpr):
    """x [128 warps] -> [warps, 128] such that a thread's eight neighbours are the inputs of its words' codes."""
    x = gl.permute(gl.reshape(x, [WARPS, 2, 2, 2, 2, 2, 2, 2]), [0, 1, 2, 5, 6, 3, 4, 7])
    return gl.reshape(x, [WARPS, 128])


@gluon.jit
def _ask(words, steps, block, turn, NP, GROUP_TILES, TILES: gl.constexpr, BLOCK_N: gl.constexpr, WORDS: gl.constexpr,
         LEFT: gl.constexpr):  # fmt: skip
    """Loads the words and steps of each warp's tile of this turn: ([warps, 2, 8 BLOCK_N], [warps, BLOCK_N])."""
    WARPS: gl.constexpr = WORDS.warps_per_cta[0]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    place = gl.arange(0, BLOCK_N * 8, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    row = block * BLOCK_N
    tile = gl.minimum(warp + turn * WARPS, TILES - 1)
    # Of a row, bits 4 and 5 are those of words of 128 and 256, bit 6 that of 1024; see `layout`
    at = words + (row // 128 * TILES).to(gl.int64) * 2048 + (row % 64 * 8 + row // 64 % 2 * 1024)
    at += tile[:, None, None] * 2048 + half[None, :, None] * 512 + place[None, None, :]
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    group = gl.minimum(warp + turn * WARPS, TILES - 1) // GROUP_TILES
    step = gl.load(steps + row + (group * NP)[:, None] + n[None, :])
    return gl.load(at, eviction_policy="evict_first"), step


@gluon.jit(do_not_specialize=["M"])
def multiply_held(
    words, steps, x, bias, out, M, N, K, NP, OUT_STRIDE, GROUP_TILES,
    TILES: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr,
    SCALE: gl.constexpr, BIAS: gl.constexpr, ADDS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A program makes BLOCK_N outputs of ROWS rows, or fewer; its warps split the tiles of K and are added at the end,
    with ADDS to what `out` holds.

    The words of AHEAD tiles a warp are asked for before the wait for x, the others as registers become free. Bytes:
    the weight once. Limit: streaming read."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 2, 4], [1, 1, 32], [num_warps, 1, 1], [2, 1, 0])
    VECTOR: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    WHOLE: gl.constexpr = gl.BlockedLayout([num_warps, 1, 1], [1, 16, 2], [1, 1, num_warps], [1, 2, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, WHOLE)
    TURNS: gl.constexpr = (TILES + num_warps - 1) // num_warps
    DTYPE: gl.constexpr = x.dtype.element_ty
    block = gl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    held = ()
    for t in gl.static_range(AHEAD):
        held = held + (_ask(words, steps, block, t, NP, GROUP_TILES, TILES, BLOCK_N, WORDS, LEFT),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_wait()

    k = gl.arange(0, num_warps * 128, VECTOR)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    xs = ()
    for m in gl.static_range(ROWS):
        row = x + gl.minimum(m, M - 1).to(gl.int64) * K
        for t in gl.static_range(TURNS):
            column = t * num_warps * 128 + k
            xs = xs + (gl.load(row + column, mask=column < K, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    staged = ()
    for i in gl.static_range(ROWS * TURNS):
        part = gl.allocate_shared_memory(DTYPE, [num_warps, 128], PLAIN)
        part.store(_ordered(xs[i], num_warps))
        staged = staged + (part,)  # type: ignore[assignment]  # noqa: RUF005

    m8 = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))
    total = gl.zeros([num_warps, BLOCK_N, 8], gl.float32, MMA)
    for t in gl.static_range(TURNS):
        if t + AHEAD < TURNS:
            held = held + (  # type: ignore[assignment]  # noqa: RUF005
                _ask(words, steps, block, t + AHEAD, NP, GROUP_TILES, TILES, BLOCK_N, WORDS, LEFT),
            )
        packed, step = held[t]  # type: ignore[var-annotated]
        w = _left(packed, step, DTYPE, BLOCK_N, LEFT)
        wide = gl.expand_dims(staged[t].load(gl.SliceLayout(2, RIGHT)), 2)
        wide, _ = gl.broadcast(wide, gl.zeros([num_warps, 128, 8], DTYPE, RIGHT))
        for m in gl.static_range(1, ROWS):
            more = gl.expand_dims(staged[m * TURNS + t].load(gl.SliceLayout(2, RIGHT)), 2)
            more, _ = gl.broadcast(more, wide)
            flag, _ = gl.broadcast((m8[None, None, :] == m).to(gl.int32), wide)
            wide = gl.inline_asm_elementwise(
                _CHOOSE, "=r,r,r,r,r", [more, wide, flag], dtype=wide.dtype, is_pure=True, pack=2
            )
        product = mma_v2(w, wide, gl.zeros([num_warps, BLOCK_N, 8], gl.float32, MMA))
        scale = gl.convert_layout(scale_of(step, SCALE).to(gl.float32), gl.SliceLayout(2, MMA), assert_trivial=True)
        total += product * scale[:, :, None]
    y = gl.sum(gl.convert_layout(total, WHOLE), 0)
    y_n = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
    y_m = gl.arange(0, 8, gl.SliceLayout(0, OUT))
    store_sums(y, y_n, y_m, bias, out, M, N, OUT_STRIDE, BIAS, ADDS)
