# The kernel at the end is compiled by Triton: it is no typed Python
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Which tile of queries does what, found on the device: one launch, no sort, no synchronisation.

A tile is a run of consecutive queries of one row. Persistent programs take tiles in the order of this schedule, those
that see most blocks of entries first, so that none is left with a long one at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from .problem import EVERYTHING

if TYPE_CHECKING:
    from torch import Tensor

#: int32 fields of a tile's record, see `Schedule.tiles`.
FIELDS = tl.constexpr(8)
ROW = tl.constexpr(0)
FIRST_TOKEN = tl.constexpr(1)
TOKENS = tl.constexpr(2)
POSITION = tl.constexpr(3)
KV_LEN = tl.constexpr(4)
FIRST_BLOCK = tl.constexpr(5)
END_BLOCK = tl.constexpr(6)
LOWEST = tl.constexpr(7)


class Schedule:
    """The tiles of a step.

    tiles [limit, 8] int32, the longest first: row; its first token; how many tokens; the entry at which the first of
    them stands; the row's kv_len; the first block of entries that any of them sees; the end of those blocks, at least
    one more; the first entry that any query of the row sees. count [1] int32: how many there are. `limit`: the most
    that there can be.
    """

    def __init__(self, tiles: Tensor, count: Tensor) -> None:
        self.tiles = tiles
        self.count = count

    @property
    def limit(self) -> int:
        return self.tiles.shape[0]


class Part(NamedTuple):
    """Which rows a schedule is of: first_row <= row < end_row with above < kv_len <= most."""

    first_row: int
    end_row: int
    above: int = -1
    most: int = EVERYTHING


def tile_limit(rows: int, tokens: int, max_query: int, tile_tokens: int) -> int:
    """The most tiles that rows of at most `max_query` queries and `tokens` in all can have; at least 1."""
    return max(1, min(tokens // tile_tokens + rows, rows * -(-max_query // tile_tokens)))


def make_schedule(
    query_start: Tensor,
    kv_len: Tensor,
    *,
    tokens: int,
    max_query: int,
    tile_tokens: int,
    block: int,
    causal: bool = True,
    window: int | None = None,
    part: Part | None = None,
) -> Schedule:
    """query_start [R+1] and kv_len [R] int32; tiles of `tile_tokens` queries, blocks of `block` entries. None: all
    rows."""
    import torch  # not for those who compile the kernel

    part = part or Part(0, kv_len.shape[0])
    rows = part.end_row - part.first_row
    limit = tile_limit(rows, tokens, max_query, tile_tokens)
    tiles = torch.empty(limit, FIELDS.value, dtype=torch.int32, device=kv_len.device)
    count = torch.empty(1, dtype=torch.int32, device=kv_len.device)
    per_program = 64
    grid = (max(1, rows), triton.cdiv(max(1, -(-max_query // tile_tokens)), per_program))
    _schedule[grid](
        query_start,
        kv_len,
        tiles,
        count,
        part.first_row,
        part.end_row,
        part.above,
        part.most,
        min(window or 0, EVERYTHING),
        TILE=tile_tokens,
        BLOCK=block,
        CAUSAL=causal,
        WINDOW=window is not None,
        PROGRAM_TILES=per_program,
        ROW_BLOCK=128,
    )
    return Schedule(tiles, count)


@triton.jit
def _tiles_above(cost, queries, kv_len, longest, TILE: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """How many tiles of a row cost more than `cost`. A tile's cost is the number of blocks up to its last query, at
    most `longest` and at least 1, so that it grows along the row and can be counted without looking at each tile."""
    tiles = tl.cdiv(queries, TILE)
    if CAUSAL:
        # Tile m ends before entry kv_len - queries + (m + 1) * TILE, the last one at kv_len
        reach = tl.maximum(cost * BLOCK - (kv_len - queries), 0)
        within = tl.minimum(reach // TILE, tiles)
        within = tl.where(tl.cdiv(kv_len, BLOCK) <= cost, tiles, within)
    else:
        within = tl.where(tl.cdiv(kv_len, BLOCK) <= cost, tiles, 0)
    within = tl.where(cost >= longest, tiles, within)
    return tl.where(cost < 1, tiles, tiles - within)


@triton.jit
def _rows(query_start_ptr, kv_len_ptr, row, inside, above, most):
    """(first token, queries, kv_len) of rows; no queries for those of other kernels."""
    first_token = tl.load(query_start_ptr + row, mask=inside, other=0)
    kv_len = tl.load(kv_len_ptr + row, mask=inside, other=0)
    queries = tl.load(query_start_ptr + row + 1, mask=inside, other=0) - first_token
    return first_token, tl.where((kv_len > above) & (kv_len <= most), queries, 0), kv_len


# Rows of a part change from launch to launch: they are no reason to compile anew
@triton.jit(do_not_specialize=["first_row", "end_row", "above", "most"])
def _schedule(
    query_start_ptr,
    kv_len_ptr,
    tiles_ptr,
    count_ptr,
    first_row,
    end_row,
    above,
    most,
    window,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PROGRAM_TILES: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Each program ranks PROGRAM_TILES tiles of one row among those of all rows, and writes them at their rank."""
    row = first_row + tl.program_id(0)
    tile = tl.program_id(1) * PROGRAM_TILES + tl.arange(0, PROGRAM_TILES)
    first_token, queries, kv_len = _rows(query_start_ptr, kv_len_ptr, row, row < end_row, above, most)
    tiles = tl.cdiv(queries, TILE)
    longest = 2147483647
    if WINDOW:
        longest = tl.cdiv(window + TILE, BLOCK) + 1

    prefix = kv_len - queries
    position = prefix + tile * TILE
    if CAUSAL:
        end = tl.minimum(position + TILE, kv_len)
    else:
        end = tl.zeros_like(tile) + kv_len
    end_block = tl.maximum(tl.cdiv(end, BLOCK), 1)
    first_block = tl.zeros_like(tile)
    lowest = 0
    if WINDOW:
        first_block = tl.minimum(tl.maximum(position - window + 1, 0) // BLOCK, end_block - 1)
        lowest = tl.maximum(prefix - window + 1, 0)

    cost = tl.minimum(end_block, longest)
    rank = tile - (tiles - _tiles_above(cost - 1, queries, kv_len, longest, TILE, BLOCK, CAUSAL))
    count = 0
    for start in range(first_row, end_row, ROW_BLOCK):
        other = start + tl.arange(0, ROW_BLOCK)
        _, other_queries, other_kv = _rows(query_start_ptr, kv_len_ptr, other, other < end_row, above, most)
        count += tl.sum(tl.cdiv(other_queries, TILE))
        costlier = _tiles_above(cost[:, None], other_queries[None], other_kv[None], longest, TILE, BLOCK, CAUSAL)
        least = _tiles_above(cost[:, None] - 1, other_queries[None], other_kv[None], longest, TILE, BLOCK, CAUSAL)
        rank += tl.sum(tl.where(other[None] < row, least, costlier), 1)
    if (row == first_row) & (tl.program_id(1) == 0):
        tl.store(count_ptr, count)

    record = tiles_ptr + rank.to(tl.int64) * FIELDS
    mask = tile < tiles
    tl.store(record + ROW, tl.zeros_like(tile) + row, mask=mask)
    tl.store(record + FIRST_TOKEN, first_token + tile * TILE, mask=mask)
    tl.store(record + TOKENS, tl.minimum(queries - tile * TILE, TILE), mask=mask)
    tl.store(record + POSITION, position, mask=mask)
    tl.store(record + KV_LEN, tl.zeros_like(tile) + kv_len, mask=mask)
    tl.store(record + FIRST_BLOCK, first_block, mask=mask)
    tl.store(record + END_BLOCK, end_block, mask=mask)
    tl.store(record + LOWEST, tl.zeros_like(tile) + lowest, mask=mask)
