"""The device's view of one step. The runner owns every tensor here; parts read them and never write.

Letters: T tokens in the step, R rows, P pages per row, G cache groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the host knows without asking the device: upper bounds, exact for `rows`, `tokens` and queries.

    While a step is captured as a graph these are the bounds of the graph's bucket, so a part must size its
    launches from them and take true lengths from the device.
    """

    rows: int
    tokens: int
    #: Longest query of a row, and the shortest (equal: the batch is a dense [R, n]).
    max_query: int
    min_query: int
    #: Upper bound of `kv_len`.
    max_kv: int


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """A run of rows as one attention backend sees them, for one cache group.

    Row r's queries are tokens query_start[r] .. query_start[r+1]-1 of the q that the backend is given; they are
    the last n entries of the row's kv_len entries in the cache. Query i may attend entries
    0 .. kv_len - n + i, within the layer's window. With `ancestors`, query i attends the kv_len - n entries
    before the step and those of the row's own queries j whose bit j is set in ancestors[token i] (its own bit
    included).
    """

    #: [R+1] int32, starts at 0
    query_start: Tensor
    #: [R] int32, entries in the cache, this step's included. 0: an idle row, gives zeros.
    kv_len: Tensor
    #: [R, P] int32; entry e of row r lies in page page_table[r, e // S] at e % S. Ids past the last entry, and
    #: of pages that fell out of a window, are arbitrary valid ids whose content must not matter (NaN included).
    page_table: Tensor
    #: [R] int64
    row_slot: Tensor
    #: [T] int64 bit masks over the row's own queries (at most 63 of them), or None for a chain.
    ancestors: Tensor | None
    bounds: Bounds


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Rows with few queries (decode and verify) come first, prefill chunks after them."""

    #: [T] int64 token ids
    ids: Tensor
    #: [T] int64 positions for rope: the true place in the text, whatever pages were dropped.
    positions: Tensor
    #: Per cache group, [T] int64: the flat entry (page * S + offset) where each token's K/V is written. In a state
    #: group the page where the state after that token is written: one page for all tokens of a prefill chunk (the
    #: last state stays), one each for the queries of a verify step.
    write_index: tuple[Tensor, ...]
    #: Per cache group, [R] int64 for a state group: the page that holds each row's state before this step (position 0:
    #: the state is zero, whatever the page holds); None for the others. After a verify step it is the page of the last
    #: kept query, picked on the device.
    state_page: tuple[Tensor | None, ...]
    #: Per cache group, the rows that the decode backend serves, or None when there are none.
    decode: tuple[Rows, ...] | None
    #: Per cache group, the rows that the prefill backend serves, or None when there are none.
    prefill: tuple[Rows, ...] | None
    #: Tokens of the decode rows: q[:decode_tokens] belongs to them.
    decode_tokens: int
    bounds: Bounds
