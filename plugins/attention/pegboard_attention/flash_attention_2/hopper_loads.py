# Kernels are compiled by Triton: they are no typed Python
# mypy: ignore-errors
"""The Hopper kernel's loading warps, and the order in which all of its warps take tiles. See `hopper`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .schedule import END_BLOCK, FIELDS, FIRST_BLOCK, FIRST_TOKEN, KV_LEN, ROW

#: Rows (queries x heads) of a warpgroup. A tile has those of two.
GROUP_ROWS = gl.constexpr(64)


@gluon.jit
def tile_of(index):
    """The index-th tile of this program. Odd rounds go backwards, and each pair of rounds begins a quarter further on,
    so that nobody has the longest one in every round or pair."""
    programs = gl.num_programs(0)
    place = gl.program_id(0) + index // 2 % 4 * (programs // 4)
    place -= gl.where(place >= programs, programs, 0)
    return index * programs + gl.where(index % 2 == 1, programs - 1 - place, place)


@gluon.jit
def rounds_of(tiles):
    """How many tiles this program takes. Only the last round may lack some."""
    whole = tiles // gl.num_programs(0)
    return whole + (tile_of(whole) < tiles).to(gl.int32)


@gluon.jit
def _copy_block(descriptor, barrier, buffer, pages, entry, head, BLOCK: gl.constexpr, PAGE: gl.constexpr):
    """One block of K or V of one head, from its pages or, without pages, from entries that lie side by side."""
    mbarrier.expect(barrier, BLOCK * buffer.shape[3] * 2)
    if PAGE == 0:
        tma.async_copy_global_to_shared(descriptor, [0, entry, head, 0], barrier, buffer)
    elif PAGE >= BLOCK:
        tma.async_copy_global_to_shared(descriptor, [pages[0], entry % PAGE, head, 0], barrier, buffer)
    else:
        for j in gl.static_range(BLOCK // PAGE):
            part = buffer.slice(j * PAGE, PAGE, dim=1)
            tma.async_copy_global_to_shared(descriptor, [pages[j], 0, head, 0], barrier, part)


@gluon.jit
def _pages(table, block, kv_len, BLOCK: gl.constexpr, PAGE: gl.constexpr):
    """The ids of a block's pages; page 0 in place of those behind the row's last one, which the table may lack."""
    if PAGE == 0:
        return (block,)
    elif PAGE >= BLOCK:  # noqa: RET505  # compile-time branches
        return (gl.load(table + block * BLOCK // PAGE),)
    else:
        ids = ()
        for j in gl.static_range(BLOCK // PAGE):
            place = table + block * (BLOCK // PAGE) + j
            ids = ids + (gl.load(place, mask=block * BLOCK + j * PAGE < kv_len, other=0),)  # noqa: RUF005
        return ids


@gluon.jit
def _load(loads, work, memory, barriers, config, WHAT: gl.constexpr):
    """Q and K, or V: a warp each, so that many small pages are asked for in time."""
    q_desc, k_desc, v_desc, table_ptr, table_stride, kv_start_ptr = loads
    tiles_ptr, count_ptr, groups, groups_per_kv = work
    q_smem, _, k_smem, v_smem = memory
    q_full, q_free, k_full, k_free, v_full, v_free, _ = barriers
    BLOCK: gl.constexpr = config[0]
    PAGE: gl.constexpr = config[1]
    STAGES: gl.constexpr = config[2]
    HEADS: gl.constexpr = config[3]
    TILE: gl.constexpr = 2 * GROUP_ROWS // HEADS

    step = 0
    for index in range(rounds_of(gl.load(count_ptr) * groups)):
        tile = tile_of(index)
        group = tile % groups
        head = group // groups_per_kv
        record = tiles_ptr + (tile // groups) * FIELDS
        row = gl.load(record + ROW)
        first_block = gl.load(record + FIRST_BLOCK)
        end_block = gl.load(record + END_BLOCK)
        kv_len = gl.load(record + KV_LEN)
        table = table_ptr + row.to(gl.int64) * table_stride
        base = 0
        if PAGE == 0:
            base = gl.load(kv_start_ptr + row)
        if WHAT == "k":
            first_token = gl.load(record + FIRST_TOKEN)
            side = index % 2
            mbarrier.wait(q_free.index(side), ((index // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(side), 2 * GROUP_ROWS * q_smem.shape[3] * 2)
            for part in gl.static_range(2):
                place = [first_token + part * (TILE // 2), group * HEADS, 0]
                tma.async_copy_global_to_shared(q_desc, place, q_full.index(side), q_smem.index(2 * side + part))
        for past in range(end_block - first_block):
            block = end_block - 1 - past
            slot = step % STAGES
            free = ((step // STAGES) & 1) ^ 1
            pages = _pages(table, block, kv_len, BLOCK, PAGE)
            entry = base + block * BLOCK
            if WHAT == "k":
                mbarrier.wait(k_free.index(slot), free)
                _copy_block(k_desc, k_full.index(slot), k_smem.index(slot), pages, entry, head, BLOCK, PAGE)
            else:
                mbarrier.wait(v_free.index(slot), free)
                _copy_block(v_desc, v_full.index(slot), v_smem.index(slot), pages, entry, head, BLOCK, PAGE)
            step += 1


@gluon.jit
def load_q_and_k(loads, work, memory, barriers, config):
    _load(loads, work, memory, barriers, config, "k")


@gluon.jit
def load_v(loads, work, memory, barriers, config):
    _load(loads, work, memory, barriers, config, "v")
