# Kernels are compiled by Triton: they are no typed Python
# mypy: ignore-errors
"""The forward pass on Hopper: bulk copies, warp specialisation and asynchronous matrix products, in Gluon.

One program a multiprocessor takes tiles from the schedule. Two warps load (`hopper_loads`): Q once a tile, then blocks
of K and V from the last to the first, page by page. Two warpgroups of 64 query rows each compute. They take turns:
while the matrix units work on one's QK of a block and PV of the block before, the other exponentiates (the overlap of
FlashAttention-3, Shah et al., 2024, arXiv 2407.08608); QK of a tile's first block is issued beside PV of the last
tile's last. The matrix units, and then the chip's power, are the limit; K and V come from L2, where programs that share
a KV head walk side by side.

Tuples bundle what functions share: loads, stores and work are what a role needs of the arguments; rules says how scores
are made; config holds the compile-time constants, in the order of `hopper_forward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_loads import GROUP_ROWS, load_q_and_k, load_v, rounds_of, tile_of
from .schedule import END_BLOCK, FIELDS, FIRST_BLOCK, FIRST_TOKEN, KV_LEN, LOWEST, POSITION, TOKENS

#: Hidden scores are -inf, and a row's greatest score at least this: exp2(-inf - LEAST) is 0, not NaN, while a row has
#: seen nothing yet.
LEAST = gl.constexpr(-1e30)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _scores(product, block, sight, rules, config, MASKED: gl.constexpr):
    """What the softmax sees of a block: capped and masked."""
    position, kv_len = sight
    _, pre_scale, window = rules
    BLOCK: gl.constexpr = config[0]
    CAUSAL: gl.constexpr = config[4]
    SOFTCAP: gl.constexpr = config[6]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1)
        product = 1 - 2 / (gl.exp2(product * pre_scale) + 1)
    if MASKED:
        # One unsigned comparison: 0 <= query - entry < window, or 0 <= entry < kv_len. In assembly, because the
        # compiler would pack such masks bit by bit into integers and back
        entry = gl.expand_dims(block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout)), 0)
        if CAUSAL:
            place = gl.expand_dims(position, 1) - entry
            limit = window
        else:
            place = entry + gl.zeros([GROUP_ROWS, BLOCK], gl.int32, layout)
            limit = kv_len
        product = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.lo.u32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen; }",
            "=f,f,r,r",
            [product, place, gl.full([GROUP_ROWS, BLOCK], 0, gl.int32, layout) + limit],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    return product


@gluon.jit
def _partial_sums(p, BLOCK: gl.constexpr):
    """[GROUP_ROWS, 4]: what each thread of a row has of its sum. To add them up would take shuffles, for which the
    rescaling of acc behind them would have to wait; that is left to the end of the tile."""
    return gl.sum(gl.sum(p.reshape([GROUP_ROWS, BLOCK // 8, 4, 2]), 3), 1)


@gluon.jit
def _blocks(state, first, end, side, sight, rules, memory, barriers, config, which: gl.constexpr, MASKED: gl.constexpr):
    """Blocks end - 1 down to first. The state enters and leaves with the weights p of the block before still to be
    multiplied by its V."""
    p, acc, peak, total, step, turn = state
    q_smem, _, k_smem, v_smem = memory
    _, _, k_full, k_free, v_full, v_free, turns = barriers
    BLOCK: gl.constexpr = config[0]
    STAGES: gl.constexpr = config[2]
    WIDTH: gl.constexpr = v_smem.shape[4]
    dtype: gl.constexpr = v_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    scale = rules[0]
    empty = gl.zeros([GROUP_ROWS, BLOCK], gl.float32, s_layout)
    q = q_smem.index(2 * side + which).reshape([GROUP_ROWS, WIDTH])
    for past in range(end - first):
        block = end - 1 - past
        before = step % STAGES
        before_phase = (step // STAGES) & 1
        step += 1
        slot = step % STAGES
        phase = (step // STAGES) & 1
        weights = gl.convert_layout(p.to(dtype), p_layout)
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.wait(v_full.index(before), before_phase)
        mbarrier.wait(turns.index(which), (turn & 1) ^ (1 - which))
        k = k_smem.index(slot).reshape([BLOCK, WIDTH])
        v = v_smem.index(before).reshape([BLOCK, WIDTH])
        product = warpgroup_mma(q, k.permute((1, 0)), empty, use_acc=False, is_async=True)
        mixed = warpgroup_mma(weights, v, acc, is_async=True)
        mbarrier.arrive(turns.index(1 - which), count=1)
        turn += 1
        s = warpgroup_mma_wait(1, deps=[product])
        mbarrier.arrive(k_free.index(slot), count=1)
        s = _scores(s, block, sight, rules, config, MASKED)
        higher = gl.maximum(peak, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - gl.expand_dims(higher, 1))
        fade = gl.exp2(peak - higher)
        sums = _partial_sums(p, BLOCK)
        part_layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
        total = total * gl.expand_dims(gl.convert_layout(fade, part_layout), 1) + sums
        peak = higher
        # Long since full. The branch in this wait keeps the assembler from waiting for PV before it exponentiates
        mbarrier.wait(v_full.index(before), before_phase)
        acc = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(fade, o_row_layout), 1)
    return p, acc, peak, total, step, turn


@gluon.jit
def _clean(buffer, block, lowest, kv_len, BLOCK: gl.constexpr):
    """Zeros in place of what nobody may read, NaN perhaps: a weight of 0 would not hide it. Both warpgroups do it,
    each for itself, and write the same."""
    WIDTH: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    CHUNK: gl.constexpr = 32
    for j in gl.static_range(BLOCK // CHUNK):
        part = buffer.slice(j * CHUNK, CHUNK)
        entry = block * BLOCK + j * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
        seen = gl.expand_dims((entry >= lowest) & (entry < kv_len), 1)
        values = part.load(layout)
        part.store(gl.where(seen, values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _consume(stores, rules, work, memory, barriers, config, which: gl.constexpr):
    o_desc, o_ptr, lse_ptr, sinks_ptr, tokens = stores
    tiles_ptr, count_ptr, groups, _ = work
    q_smem, o_smem, k_smem, v_smem = memory
    q_full, q_free, k_full, k_free, v_full, v_free, turns = barriers
    scale, _, window = rules
    BLOCK: gl.constexpr = config[0]
    STAGES: gl.constexpr = config[2]
    HEADS: gl.constexpr = config[3]
    CAUSAL: gl.constexpr = config[4]
    WINDOW: gl.constexpr = config[5]
    SINKS: gl.constexpr = config[7]
    LSE: gl.constexpr = config[8]
    HEAD_SIZE: gl.constexpr = config[9]
    TILE: gl.constexpr = 2 * GROUP_ROWS // HEADS
    WIDTH: gl.constexpr = v_smem.shape[4]
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)

    # Rows of a tile are queries, each with its heads side by side
    query = (which * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=row_layout)) // HEADS
    empty = gl.zeros([GROUP_ROWS, BLOCK], gl.float32, s_layout)
    step = 0
    turn = 0
    rounds = rounds_of(gl.load(count_ptr) * groups)

    # QK of a tile's last block, the first to be looked at, runs beside the end of the tile before
    mbarrier.wait(q_full.index(0), 0, pred=rounds > 0)
    mbarrier.wait(k_full.index(0), 0, pred=rounds > 0)
    q = q_smem.index(which).reshape([GROUP_ROWS, WIDTH])
    k = k_smem.index(0).reshape([BLOCK, WIDTH])
    product = warpgroup_mma(q, k.permute((1, 0)), empty, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(k_free.index(0), count=1)
    for index in range(rounds):
        tile = tile_of(index)
        group = tile % groups
        record = tiles_ptr + (tile // groups) * FIELDS
        first_token = gl.load(record + FIRST_TOKEN)
        valid = gl.load(record + TOKENS)
        first_position = gl.load(record + POSITION)
        kv_len = gl.load(record + KV_LEN)
        first_block = gl.load(record + FIRST_BLOCK)
        end_block = gl.load(record + END_BLOCK)
        lowest = gl.load(record + LOWEST)
        sight = (first_position + query, kv_len)
        slot = step % STAGES
        phase = (step // STAGES) & 1
        s = _scores(s, end_block - 1, sight, rules, config, True)
        peak = gl.maximum(gl.max(s, 1) * scale, LEAST)
        p = gl.exp2(s * scale - gl.expand_dims(peak, 1))
        total = _partial_sums(p, BLOCK)
        if (end_block * BLOCK > kv_len) | ((end_block - 1) * BLOCK < lowest):
            mbarrier.wait(v_full.index(slot), phase)
            _clean(v_smem.index(slot).reshape([BLOCK, WIDTH]), end_block - 1, lowest, kv_len, BLOCK)
        acc = gl.zeros([GROUP_ROWS, WIDTH], gl.float32, o_layout)

        # Those that not all queries see to the end, those that all see, those that fall out of some queries' window
        whole_end = end_block - 1
        if CAUSAL:
            whole_end = gl.maximum(gl.minimum((first_position + 1) // BLOCK, whole_end), first_block)
        whole_first = first_block
        if WINDOW:
            last_start = first_position + valid - window  # the first entry that the last query sees
            whole_first = gl.minimum(gl.maximum((last_start + BLOCK - 1) // BLOCK, first_block), whole_end)
        # Three times the same, which the compiler must not know: from one value ptxas 12.8 derives the address of Q
        # before the first of the loops over blocks only, and reads garbage in the second when the first is empty
        late_side = index % 2
        whole_side = late_side + (valid >> 16)
        early_side = late_side + (kv_len >> 31)
        state = (p, acc, peak, total, step, turn)
        if CAUSAL:
            state = _blocks(
                state, whole_end, end_block - 1, late_side, sight, rules, memory, barriers, config, which, True
            )
        state = _blocks(state, whole_first, whole_end, whole_side, sight, rules, memory, barriers, config, which, False)
        if WINDOW:
            state = _blocks(
                state, first_block, whole_first, early_side, sight, rules, memory, barriers, config, which, True
            )
        p, acc, peak, total, step, turn = state
        total = gl.convert_layout(gl.sum(total, 1), row_layout)
        mbarrier.arrive(q_free.index(index % 2), count=1)

        # PV of the tile's first block, QK of the next tile's last. What QK gives if there is none is not used
        more = index + 1 < rounds
        side = (index + 1) % 2
        slot = step % STAGES
        phase = (step // STAGES) & 1
        step += 1
        ahead = step % STAGES
        weights = gl.convert_layout(p.to(dtype), p_layout)
        mbarrier.wait(v_full.index(slot), phase)
        q = q_smem.index(2 * side + which).reshape([GROUP_ROWS, WIDTH])
        k = k_smem.index(ahead).reshape([BLOCK, WIDTH])
        v = v_smem.index(slot).reshape([BLOCK, WIDTH])
        if WINDOW:  # noqa: SIM102  # one at compile time, one at run time
            if first_block * BLOCK < lowest:
                _clean(v, first_block, lowest, kv_len, BLOCK)
        mbarrier.wait(q_full.index(side), ((index + 1) // 2) & 1, pred=more)
        mbarrier.wait(k_full.index(ahead), (step // STAGES) & 1, pred=more)
        mbarrier.wait(turns.index(which), (turn & 1) ^ (1 - which))
        mixed = warpgroup_mma(weights, v, acc, is_async=True)
        product = warpgroup_mma(q, k.permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.arrive(turns.index(1 - which), count=1)
        turn += 1
        seen_any = total > 0
        if SINKS:
            head = group * HEADS + (gl.arange(0, GROUP_ROWS, layout=row_layout) % HEADS)
            sink = gl.load(sinks_ptr + head) * LOG2E
            higher = gl.maximum(peak, sink)
            fade = gl.exp2(peak - higher)
            total = total * fade + gl.exp2(sink - higher)
            peak = higher
        else:
            fade = gl.full_like(total, 1.0)
        fade = gl.where(seen_any, fade / total, 0.0)
        acc = warpgroup_mma_wait(1, deps=[mixed])
        mbarrier.arrive(v_free.index(slot), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(fade, o_row_layout), 1)

        if LSE:
            head = group * HEADS + gl.arange(0, GROUP_ROWS, layout=row_layout) % HEADS
            lse = gl.where(seen_any, (peak + gl.log2(total)) * LN2, -float("inf"))
            gl.store(lse_ptr + head.to(gl.int64) * tokens + first_token + query, lse, mask=query < valid)
        if valid == TILE:
            staging = o_smem.index(which)
            tma.store_wait(0)
            staging.reshape([GROUP_ROWS, WIDTH]).store(acc.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [first_token + which * (TILE // 2), group * HEADS, 0], staging)
        else:
            # Copied in bulk, the rest of the tile would fall on the next row's tokens
            row = which * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=o_row_layout)
            offset = (first_token + row // HEADS).to(gl.int64) * (groups * HEADS) + group * HEADS + row % HEADS
            column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, o_layout))
            mask = gl.expand_dims(row // HEADS < valid, 1) & gl.expand_dims(column < HEAD_SIZE, 0)
            place = gl.expand_dims(offset * HEAD_SIZE, 1) + gl.expand_dims(column, 0)
            gl.store(o_ptr + place, acc.to(dtype), mask=mask)
        s = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(k_free.index(ahead), count=1, pred=more)
    tma.store_wait(0)


@gluon.jit
def _first_group(stores, rules, work, memory, barriers, config):
    _consume(stores, rules, work, memory, barriers, config, 0)


@gluon.jit
def _second_group(stores, rules, work, memory, barriers, config):
    _consume(stores, rules, work, memory, barriers, config, 1)


@gluon.jit
def hopper_forward(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, sinks_ptr, table_ptr, kv_start_ptr, tiles_ptr, count_ptr,
    table_stride, tokens, scale, pre_scale, window, groups, groups_per_kv,
    BLOCK: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, HEADS: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, HEAD_SIZE: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """See the module. Descriptors: q and o [T, H, D] by boxes of (queries of a warpgroup, HEADS, D padded), k and v
    [pages, S, K, D] by boxes of (1, min(S, BLOCK), 1, D padded), or [1, entries, K, D] when PAGE is 0."""
    WIDTH: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    kv_layout: gl.constexpr = k_desc.layout
    q_smem = gl.allocate_shared_memory(dtype, [4, GROUP_ROWS // HEADS, HEADS, WIDTH], q_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS // HEADS, HEADS, WIDTH], o_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK, 1, WIDTH], kv_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK, 1, WIDTH], kv_layout)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    loads = (q_desc, k_desc, v_desc, table_ptr, table_stride, kv_start_ptr)
    stores = (o_desc, o_ptr, lse_ptr, sinks_ptr, tokens)
    rules = (scale, pre_scale, window)
    work = (tiles_ptr, count_ptr, groups, groups_per_kv)
    memory = (q_smem, o_smem, k_smem, v_smem)
    barriers = (q_full, q_free, k_full, k_free, v_full, v_free, turns)
    config: gl.constexpr = (BLOCK, PAGE, STAGES, HEADS, CAUSAL, WINDOW, SOFTCAP, SINKS, LSE, HEAD_SIZE)
    gl.warp_specialize(
        [
            (_first_group, (stores, rules, work, memory, barriers, config)),
            (_second_group, (stores, rules, work, memory, barriers, config)),
            (load_q_and_k, (loads, work, memory, barriers, config)),
            (load_v, (loads, work, memory, barriers, config)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
