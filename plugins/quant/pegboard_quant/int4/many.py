"""Products of many rows with tiles of 4-bit weights on Hopper, whose tensor cores take W from registers: Y^T = W X^T.

Letters: M rows of x, N outputs, K inputs; a tile has 128 columns. See `layout` for the order of codes."""

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

from .registers import left_codes, less_zero, scale_of, times_scale
from .renamed import copy_in


@gluon.jit
def _left(packed, BN: gl.constexpr, SCALE: gl.constexpr, LEFT: gl.constexpr, DTYPE: gl.constexpr):
    """Words [2, BN / 64, 512] and steps [BN] -> weights [BN, 128], rounded once."""
    words, step = packed
    codes = left_codes(words, BN, LEFT, DTYPE)
    codes = less_zero(codes, gl.expand_dims(step >> 16, 1))
    return times_scale(codes, gl.expand_dims(scale_of(step, SCALE), 1))


@gluon.jit
def _ask(words, steps, tile, NP, GROUP_TILES):
    """Loads the words and the steps of a tile."""
    return gl.load(words + tile * 2048, eviction_policy="evict_first"), gl.load(steps + tile // GROUP_TILES * NP)


@gluon.jit
def _copy(x, row, tile, memory, there):
    """Begins to copy x's columns of the part's tile to the buffer that is its turn."""
    buffers, full, _, first = memory
    slot = tile % buffers.shape[0]
    mbarrier.expect(full.index(slot), buffers.shape[1] * 256, pred=there)
    copy_in(x, [row, (first + tile) * 128], full.index(slot), buffers.index(slot), pred=there)


@gluon.jit
def _multiply(left, tile, queued, memory):
    """Queues the product with a tile of x, once it is there."""
    buffers, full, _, _ = memory
    slot = tile % buffers.shape[0]
    mbarrier.wait(full.index(slot), tile // buffers.shape[0] & 1)
    return warpgroup_mma(left, buffers.index(slot).permute((1, 0)), queued, is_async=True)


@gluon.jit
def _follow(x, row, tile, past, packed, memory):
    """Waits for all products but the one just queued, that with `tile`. The left operand `past` is read until then, so
    words go through the wait, too: whoever unpacks them does so later. Copies to the buffer that became free."""
    buffers, _, count, _ = memory
    words, step = packed
    _, words, step = warpgroup_mma_wait(1, deps=[past, words, step])
    debug_barrier()
    again = tile - 1 + buffers.shape[0]
    _copy(x, row, again, memory, (tile > 0) & (again < count))
    return words, step


@gluon.jit
def _store(at, y, there, ADDS: gl.constexpr):
    """With ADDS the sum of y, already rounded as `out` is, and what is there: float32 has no room in this layout."""
    if ADDS:
        y = (y.to(gl.float32) + gl.load(at, mask=there, other=0.0).to(gl.float32)).to(y.dtype)
    gl.store(at, y, mask=there)


@gluon.jit(do_not_specialize=["M", "TILES", "TILES_A_PART"])
def multiply_many(
    words, steps, x, bias, out, partial, counters, M, N, NP, OUT_STRIDE, TILES, TILES_A_PART, GROUP_TILES,
    BN: gl.constexpr, BM: gl.constexpr, SPLIT: gl.constexpr, SCALE: gl.constexpr, BIAS: gl.constexpr,
    ADDS: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A program makes BN outputs of BM rows, a warpgroup 64 of the outputs. While the tensor cores multiply a tile, the
    next is unpacked: there are two left operands. Words are asked for two tiles before that, x by bulk copies STAGES
    tiles ahead. Bytes: the weight once for every BM rows. Limit: the tensor cores."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([2, 1, 4], [1, 1, 32], [1, num_warps // 4, 4], [2, 1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    DTYPE: gl.constexpr = x.dtype
    row_block, block, part = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first = part * TILES_A_PART
    count = gl.minimum(TILES_A_PART, TILES - first)
    buffers = gl.allocate_shared_memory(DTYPE, [STAGES, BM, 128], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    memory = (buffers, full, count, first)

    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    below = gl.arange(0, BN // 64, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    place = gl.arange(0, 512, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    words += (block * BN // 128 * TILES).to(gl.int64) * 2048 + block * BN % 128 * 16
    words += half[:, None, None] * 512 + below[None, :, None] * 1024 + place[None, None, :]
    steps += block * BN + gl.arange(0, BN, gl.SliceLayout(1, LEFT))
    last = first + count - 1
    packed = _ask(words, steps, first, NP, GROUP_TILES)
    packed1 = _ask(words, steps, gl.minimum(first + 1, last), NP, GROUP_TILES)
    packed2 = _ask(words, steps, gl.minimum(first + 2, last), NP, GROUP_TILES)
    if PDL:
        gdc_wait()
    row = row_block * BM
    for s in gl.static_range(STAGES):
        _copy(x, row, s, memory, s < count)

    even = _left(packed, BN, SCALE, LEFT, DTYPE)
    odd = even
    queued = warpgroup_mma_init(gl.zeros([BN, BM], gl.float32, MMA))
    for i in range(0, count - 1, 2):
        queued = _multiply(even, i, queued, memory)
        packed1 = _follow(x, row, i, odd, packed1, memory)
        odd = _left(packed1, BN, SCALE, LEFT, DTYPE)
        packed1 = _ask(words, steps, gl.minimum(first + i + 3, last), NP, GROUP_TILES)
        queued = _multiply(odd, i + 1, queued, memory)
        packed2 = _follow(x, row, i + 1, even, packed2, memory)
        even = _left(packed2, BN, SCALE, LEFT, DTYPE)
        packed2 = _ask(words, steps, gl.minimum(first + i + 4, last), NP, GROUP_TILES)
    total, _, _ = warpgroup_mma_wait(0, deps=[queued, even, odd])
    if count % 2:
        queued = _multiply(even, count - 1, total, memory)
        total, _ = warpgroup_mma_wait(0, deps=[queued, even])
    if PDL:
        gdc_launch_dependents()

    y_n = block * BN + gl.arange(0, BN, gl.SliceLayout(1, OUT))
    y_m = row + gl.arange(0, BM, gl.SliceLayout(0, OUT))
    there = (y_n < N)[:, None] & (y_m < M)[None, :]
    out_at = out + y_m[None, :].to(gl.int64) * OUT_STRIDE + y_n[:, None]
    if SPLIT == 1:
        if BIAS:
            n = block * BN + gl.arange(0, BN, gl.SliceLayout(1, MMA))
            total += gl.expand_dims(gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32), 1)
        _store(out_at, gl.convert_layout(total.to(DTYPE), OUT), there, ADDS)
    else:
        n = gl.arange(0, BN, gl.SliceLayout(1, MMA))
        m = gl.arange(0, BM, gl.SliceLayout(0, MMA))
        whole = row_block * gl.num_programs(1) + block
        size = gl.num_programs(0) * gl.num_programs(1) * (BN * BM)
        at = partial + whole * (BN * BM) + n[:, None] * BM + m[None, :]
        gl.store(at + part * size, total)
        debug_barrier()
        arrived = gl.atomic_add(counters + whole, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            total = gl.zeros([BN, BM], gl.float32, MMA)
            for s in gl.static_range(SPLIT):
                total += gl.load(at + s * size, cache_modifier=".cg")
            if BIAS:
                n += block * BN
                total += gl.expand_dims(gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32), 1)
            _store(out_at, gl.convert_layout(total.to(DTYPE), OUT), there, ADDS)
            gl.store(counters + whole, 0)
