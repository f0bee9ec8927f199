"""How ragged rows become dense tiles, from host bounds alone.

Rows of a tile are aligned at their *last* query and entry: query slot j of n is the row's query j - (n - n_r), column c
of L is entry kv_len_r - (L - c). Causality and window are then the same for every row (slot j sees columns up to
L - n + j), and only what lies before a row's first entry has to be masked by row.

Letters: R rows of a tile, n query slots, L columns (entries), G = H / K query heads a KV head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.batch import Bounds, Rows

#: Entries gathered at a time: rows x columns x K x D elements of K (and as many of V), unless one row is longer.
GATHER_ELEMENTS = 1 << 23
#: Scores computed at a time: rows x query slots x H x columns, unless one query has more.
SCORE_ELEMENTS = 1 << 21
#: A plan keeps its masks for all layers while they have at most this many elements together, else makes them anew.
KEPT_MASK_ELEMENTS = 1 << 24


def query_groups(bounds: Bounds) -> list[tuple[int, int, int]]:
    """(first rank, end rank, query slots) of groups of rows ranked by query length, longest first.

    The longest row has max_query. The i-th after it is at most as long as the mean of the i longest that remain, and
    their sum is known: all tokens but the longest row's and at least min_query for each row behind. Groups end where
    that bound has halved, so there are at most log2(rows) + 2 and nobody has to know the true lengths.
    """
    rows, longest, shortest = bounds.rows, bounds.max_query, bounds.min_query

    def bound(rank: int) -> int:
        if rank == 0:
            return longest
        spare = bounds.tokens - longest - (rows - 1 - rank) * shortest
        return max(1, min(longest, spare // rank))

    groups, start = [], 0
    while start < rows:
        slots, stop = bound(start), start + 1
        while stop < rows and 2 * bound(stop) > slots:
            stop += 1
        groups.append((start, stop, slots))
        start = stop
    return groups


@dataclass
class Tile:
    """Rows with the indices of their tokens and cache entries. `token` and `scatter` are None for a dense batch."""

    #: Place of the tile among the rows of a dense batch.
    first_row: int
    rows: int
    queries: int
    columns: int
    #: [R * n] int64: token of each query slot; padding reads the row's own first token.
    token: Tensor | None
    #: [R * n] int64: where the result goes; padding goes to the spare row behind the last token.
    scatter: Tensor | None
    #: [R * L] int64 flat cache entries; columns that the row may not see repeat its nearest visible entry.
    entry: Tensor
    #: [R] bool
    idle: Tensor
    #: [R] int32
    kv_len: Tensor
    query_len: Tensor
    #: [R, n] int64 or None: which of its row's queries each query sees.
    ancestors: Tensor | None
    window: int | None
    #: Query slots [first, end) and the columns [first, end) that any of them sees.
    blocks: list[tuple[slice, slice]]
    kept_masks: dict[int, Tensor] | None = field(default=None)

    def mask(self, index: int, group: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of block `index`: 0 or -inf, [R, 1, slots * G, columns]."""
        if self.kept_masks is not None and index in self.kept_masks:
            return self.kept_masks[index]
        slots, columns = self.blocks[index]
        device = self.entry.device
        slot = torch.arange(slots.start, slots.stop, device=device)[:, None]
        column = torch.arange(columns.start, columns.stop, device=device)
        visible = self._chain(slot, column) if self.ancestors is None else self._tree(self.ancestors, slots, column)
        visible = visible & (column >= (self.columns - self.kv_len)[:, None, None])
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
        mask = mask.repeat_interleave(group, dim=1)[:, None]
        if self.kept_masks is not None:
            self.kept_masks[index] = mask
        return mask

    def _chain(self, slot: Tensor, column: Tensor) -> Tensor:
        last = self.columns - self.queries + slot
        visible = column <= last
        return visible if self.window is None else visible & (column > last - self.window)

    def _tree(self, ancestors: Tensor, slots: slice, column: Tensor) -> Tensor:
        """Own queries by their bits, everything before the step; the window counts true positions, as if a query's
        path were a chain."""
        bits = (ancestors[:, :, None] >> torch.arange(63, device=column.device)) & 1
        depth = bits.sum(-1) - 1  # [R, n]
        own = column - (self.columns - self.query_len)[:, None]  # [R, L]: index among the row's queries, < 0: before
        seen = (ancestors[:, slots, None] >> own.clamp(0, 62)[:, None]) & 1 == 1
        visible = torch.where(own[:, None] < 0, True, seen)
        if self.window is None:
            return visible
        slot_of_own = (own + (self.queries - self.query_len)[:, None]).clamp(0, self.queries - 1)
        place = torch.where(own < 0, own, depth.gather(1, slot_of_own))  # position - (kv_len - query_len)
        return visible & (place[:, None] > depth[:, slots, None] - self.window)


def make_tiles(rows: Rows, layer: AttentionLayer, page_size: int) -> list[Tile]:
    """The tiles of a step, longest queries first. Uses device tensors and host bounds only."""
    bounds = rows.bounds
    dense = bounds.min_query == bounds.max_query
    groups = [(0, bounds.rows, bounds.max_query)] if dense else query_groups(bounds)
    order = None if dense else rows.query_start.diff().argsort(descending=True, stable=True)
    tiles = []
    for start, stop, queries in groups:
        columns = max(bounds.max_kv, queries)
        if layer.window is not None:
            columns = min(columns, queries + layer.window - 1)
        step = max(1, GATHER_ELEMENTS // (columns * layer.kv_heads * layer.head_size))
        for first in range(start, stop, step):
            chosen = slice(first, min(first + step, stop))
            tiles.append(_tile(rows, layer, page_size, chosen if order is None else order[chosen], queries, columns))
    size = sum(tile.rows * tile.queries * tile.columns for tile in tiles) * (layer.query_heads // layer.kv_heads)
    if size <= KEPT_MASK_ELEMENTS:
        for tile in tiles:
            tile.kept_masks = {}
    return tiles


def _tile(
    rows: Rows, layer: AttentionLayer, page_size: int, chosen: slice | Tensor, queries: int, columns: int
) -> Tile:
    device = rows.kv_len.device
    kv_len, query_len = rows.kv_len[chosen], rows.query_start.diff()[chosen]
    table = rows.page_table[chosen]
    lowest = torch.zeros_like(kv_len)
    if layer.window is not None:
        lowest = (kv_len - query_len - layer.window + 1).clamp_(min=0)
    entry = kv_len[:, None] - columns + torch.arange(columns, device=device)
    entry = entry.maximum(lowest[:, None]).minimum(kv_len[:, None] - 1).clamp_(min=0)
    flat = table.gather(1, entry // page_size).long() * page_size + entry % page_size

    token = scatter = ancestors = None
    place = torch.arange(queries, device=device) - (queries - query_len)[:, None]  # [R, n]: < 0 is padding
    # A row without queries at the very end starts behind the last token
    first = rows.query_start[:-1][chosen].long()[:, None]
    absolute = (first + place.clamp(min=0)).clamp_(max=rows.bounds.tokens - 1)
    if not isinstance(chosen, slice):
        token = absolute.flatten()
        scatter = torch.where(place >= 0, absolute, rows.bounds.tokens).flatten()
    if rows.ancestors is not None:
        ancestors = rows.ancestors[absolute]
    count = kv_len.shape[0]
    return Tile(
        first_row=chosen.start if isinstance(chosen, slice) else 0,
        rows=count,
        queries=queries,
        columns=columns,
        token=token,
        scatter=scatter,
        entry=flat.flatten(),
        idle=kv_len == 0,
        kv_len=kv_len,
        query_len=query_len,
        ancestors=ancestors,
        window=layer.window,
        blocks=list(_blocks(count, layer, queries, columns, tree=ancestors is not None)),
    )


def _blocks(
    rows: int, layer: AttentionLayer, queries: int, columns: int, *, tree: bool
) -> Iterator[tuple[slice, slice]]:
    step = max(1, SCORE_ELEMENTS // (rows * layer.query_heads * columns))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        if tree:
            yield slice(start, stop), slice(0, columns)
        else:
            offset = columns - queries
            first = 0 if layer.window is None else max(0, offset + start - layer.window + 1)
            yield slice(start, stop), slice(first, offset + stop)
