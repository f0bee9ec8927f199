"""Who reads which entries: one launch a step turns device lengths into a list of work items that all layers share.

An item is (row, first tile of entries, end entry, splits of its row), four int32. The grid is fixed from host bounds;
what is left over of it has row -1. The splits of a row are equally many tiles of `block_n` entries, but for the last.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

#: Of a binary search over the splits' length: enough for 2^16 tiles, 2 million entries in tiles of 32.
SEARCH_STEPS = tl.constexpr(17)


@triton.jit
def schedule_items(
    kv_len_ptr,
    query_start_ptr,
    items_ptr,
    first_ptr,
    rows,
    items,
    slots,
    window,
    fixed_tiles,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """kv_len [rows], query_start [rows + 1] -> items [items, 4], first [rows + 1] (a row's first item), all int32.

    One program. fixed_tiles > 0: splits of that many tiles, whatever the other rows are. Otherwise the shortest splits
    that fit `slots` programs at once; with more rows than slots, splits of 3/4 of a slot's share, which only cuts rows
    that would outlast the others. window 0: none."""
    r = tl.arange(0, ROWS)
    live = r < rows
    kv_len = tl.load(kv_len_ptr + r, mask=live, other=0)
    queries = tl.load(query_start_ptr + r + 1, mask=live, other=0) - tl.load(query_start_ptr + r, mask=live, other=0)
    lowest = tl.where(window > 0, tl.maximum(kv_len - queries - window + 1, 0), 0) // BLOCK_N
    tiles = tl.cdiv(kv_len, BLOCK_N) - lowest
    if fixed_tiles > 0:
        length = fixed_tiles
    elif rows > slots:
        length = tl.maximum(tl.cdiv(tl.sum(tiles, 0) * 3, slots * 4), 1)
    else:
        low = 1
        length = tl.maximum(tl.max(tiles, 0), 1)
        for _ in range(SEARCH_STEPS):
            middle = (low + length) // 2
            needed = tl.sum(tl.where(live, tl.maximum(tl.cdiv(tiles, middle), 1), 0), 0)
            low = tl.where(needed <= slots, low, middle + 1)
            length = tl.where(needed <= slots, middle, length)
            low = tl.minimum(low, length)
    count = tl.where(live, tl.maximum(tl.cdiv(tiles, length), 1), 0)
    first = tl.cumsum(count, 0) - count
    total = tl.sum(count, 0)
    tl.store(first_ptr + r, first, mask=live)
    tl.store(first_ptr + rows, total)
    for start in range(0, items, ROWS):
        spare = start + r
        tl.store(items_ptr + spare * 4, -1, mask=(spare >= total) & (spare < items))
    for split in range(tl.max(count, 0)):
        own = split < count
        item = items_ptr + (first + split) * 4
        begin = lowest + split * length
        tl.store(item, r, mask=own)
        tl.store(item + 1, begin, mask=own)
        tl.store(item + 2, tl.minimum((begin + length) * BLOCK_N, kv_len), mask=own)
        tl.store(item + 3, count, mask=own)


def most_items(rows: int, slots: int, tiles: int, fixed_tiles: int) -> int:
    """Upper bound of the items that `schedule_items` makes for rows of at most `tiles` tiles each."""
    if fixed_tiles:
        return rows * max(1, -(-tiles // fixed_tiles))
    spread = rows + -(-4 * slots // 3) if rows > slots else slots
    return max(rows, min(spread, rows * max(1, tiles)))


def launch_schedule(
    kv_len: Any,
    query_start: Any,
    items: Any,
    first: Any,
    *,
    slots: int,
    window: int | None,
    fixed_tiles: int,
    block_n: int,
) -> None:
    rows = kv_len.shape[0]
    width = max(32, triton.next_power_of_2(rows))
    schedule_items[(1,)](
        kv_len,
        query_start,
        items,
        first,
        rows,
        items.shape[0],
        slots,
        window or 0,
        fixed_tiles,
        BLOCK_N=block_n,
        ROWS=width,
        num_warps=1 if width <= 128 else 4,  # sums within a warp need no barrier
    )
