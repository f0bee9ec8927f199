# The kernel at the end is compiled by Triton: it is no typed Python
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Eight-bit pages as K/V of the compute dtype, side by side, for a kernel that reads nothing else.

The Hopper kernel copies tiles from memory straight to where the matrix units read them, so there is no place in it to
dequantize. Unpacking moves 6 bytes an element of K and V (one read, two written, as many read again): 1.8 ns an entry
of 8 heads of 128 on an H200, by arithmetic and as measured. A tile of the portable kernel, which dequantizes as it
goes, takes 38 ns an entry, one of the Hopper kernel 12. So with one tile a row and KV head, which fills the device with
16 rows, unpacking pays for up to 16 rows; with two tiles a row and more it always does. Measured, 2048 queries that see
8192 entries: 355 us unpacked, 1093 in tiles, 351 from a bfloat16 cache.

Bounds of padded steps are far above what their rows have, so nothing is decided by their product: rows go through the
workspace in turns, as many at once as fit by the longest row's bound, and turns of idle rows are empty launches. Only
rows that are themselves longer than the workspace, which the device sees, are left to the portable kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..widening import dequantized
from .problem import EVERYTHING, Entries, Mixing
from .schedule import Part

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.contracts.batch import Rows

#: Entries that the workspace holds at most.
MOST_ENTRIES = 1 << 16
#: Up to so many rows, or from so many queries a row (one tile) on, unpacking pays.
FEW_ROWS = 14
LEAST_QUERIES = 32


@dataclass(frozen=True)
class Room:
    """Workspaces k and v [1, entries, K, D] as some rows' entries: of row r from starts[r] on, up to `stride`."""

    k: Tensor
    v: Tensor
    starts: Tensor
    stride: int
    rows: Rows
    part: Part

    def fill(self, entries: Entries, mixing: Mixing) -> Entries:
        """What the part's rows see of quantized `entries`, in the room. Bytes: read once, written once as two each."""
        rows, part, page = self.rows, self.part, entries.page_size
        assert entries.k_scale is not None  # quantized entries have scales
        block = min(page, 64)
        unpack[((part.end_row - part.first_row) * (self.stride // block), mixing.kv_heads)](
            entries.k,
            entries.v,
            entries.k_scale,
            entries.v_scale,
            self.k,
            self.v,
            rows.page_table,
            rows.kv_len,
            rows.query_start,
            rows.page_table.stride(0),
            part.first_row,
            part.most,
            self.stride // block,
            mixing.reach if mixing.window is not None else EVERYTHING,
            K=mixing.kv_heads,
            D=mixing.head_size,
            WIDTH=triton.next_power_of_2(mixing.head_size),
            PAGE=page,
            BLOCK=block,
            FORMAT=entries.format,
            ASSEMBLY=not triton.knobs.runtime.interpret,
            num_warps=4,
        )
        return Entries(self.k, self.v, starts=self.starts)


def workspace_entries(max_rows: int, max_length: int, page_size: int) -> int:
    """Of the workspaces: all rows at their longest, up to MOST_ENTRIES."""
    return -(-min(max_rows * -(-max_length // page_size) * page_size, MOST_ENTRIES) // page_size) * page_size


def make_rooms(rows: Rows, mixing: Mixing, page_size: int, k: Tensor, v: Tensor) -> list[Room]:
    """Two flat workspaces as rooms, to be used one after another; empty: too few queries for it to pay. Rows that are
    longer than a room are in no part, see `Room.part`."""
    bounds, each = rows.bounds, mixing.kv_heads * mixing.head_size
    if not (bounds.rows <= FEW_ROWS or bounds.tokens >= LEAST_QUERIES * bounds.rows):
        return []
    capacity = k.numel() // each // page_size * page_size
    stride = min(-(-bounds.max_kv // page_size) * page_size, capacity)
    at_once = min(capacity // max(stride, 1), bounds.rows)
    k, v = (x[: capacity * each].view(1, capacity, mixing.kv_heads, mixing.head_size) for x in (k, v))
    import torch  # not for those who compile the kernel

    starts = torch.arange(bounds.rows, dtype=torch.int32, device=k.device) % at_once * stride
    parts = (Part(row, min(row + at_once, bounds.rows), most=stride) for row in range(0, bounds.rows, at_once))
    return [Room(k, v, starts, stride, rows, part) for part in parts]


@triton.jit(do_not_specialize=["first_row", "most"])
def unpack(
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_out_ptr,
    v_out_ptr,
    table_ptr,
    kv_len_ptr,
    query_start_ptr,
    table_row,
    first_row,
    most,
    blocks,
    window,
    K: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Grid (rows * blocks of BLOCK entries, KV heads). Layouts as in `quantized_kv`; out [entries, K, D]. Blocks that
    nobody sees, and rows of more than `most` entries, stay as they were."""
    row, block = first_row + tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head = tl.program_id(1)
    kv_len = tl.load(kv_len_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - tl.load(query_start_ptr + row)
    first = block * BLOCK
    if (first >= kv_len) | (first + BLOCK <= kv_len - queries - window + 1) | (kv_len > most):
        return
    page = tl.load(table_ptr + row.to(tl.int64) * table_row + first // PAGE).to(tl.int64) * K + head
    inside = first % PAGE + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    k = tl.load(k_ptr + page * (PAGE * D) + inside[:, None] * D + column[None, :], mask=(column < D)[None, :], other=0)
    v = tl.load(
        v_ptr + page * (PAGE * D) + inside[None, :] + column[:, None] * PAGE, mask=(column < D)[:, None], other=0
    )
    k_scale = tl.load(k_scale_ptr + page * PAGE + inside)
    v_scale = tl.load(v_scale_ptr + page * PAGE + inside)
    dtype: tl.constexpr = k_out_ptr.dtype.element_ty
    k = dequantized(k, k_scale[:, None], dtype, FORMAT, ASSEMBLY)
    v = tl.trans(dequantized(v, v_scale[None, :], dtype, FORMAT, ASSEMBLY))
    entry = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * (K * D) + head * D
    mask = (column < D)[None, :]
    tl.store(k_out_ptr + entry[:, None] + column[None, :], k, mask=mask)
    tl.store(v_out_ptr + entry[:, None] + column[None, :], v, mask=mask)
