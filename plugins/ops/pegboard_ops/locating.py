"""Where rows of one token go on: what a decode step needs beside its slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pegboard.contracts.ops import Located

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.contracts.ops import SlotTables

    from .launching import Launcher


_BLOCK = 256


@triton.jit
def locate_rows(
    slots_ptr,
    advance_ptr,
    lengths_ptr,
    last_ids_ptr,
    pages_ptr,
    dropped_ptr,
    numbers_ptr,
    kv_len_ptr,
    table_ptr,
    rows,
    columns,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, blocks of pages). numbers [4, rows]: ids, positions, ends, write_index."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + row)
    own = pages_ptr + slot * columns
    if tl.program_id(1) == 0:
        position = tl.load(lengths_ptr + slot)
        dropped = tl.load(dropped_ptr + slot)
        end = position + tl.load(advance_ptr + row)
        entry = position - dropped
        page = tl.load(own + entry // PAGE).to(tl.int64)
        tl.store(numbers_ptr + row, tl.load(last_ids_ptr + slot))
        tl.store(numbers_ptr + rows + row, position)
        tl.store(numbers_ptr + 2 * rows + row, end)
        tl.store(numbers_ptr + 3 * rows + row, page * PAGE + entry % PAGE)
        tl.store(kv_len_ptr + row, (end - dropped).to(tl.int32))
    inside = column < width
    tl.store(table_ptr + row * width + column, tl.load(own + column, mask=inside, other=0), mask=inside)


def launch_locate(slots: Tensor, advance: Tensor, tables: SlotTables, width: int, launcher: Launcher) -> Located:
    """Reference: `pegboard.ops.TorchOps.locate`, exactly. Bytes: `width` page ids read and written a row."""
    rows, pages = slots.shape[0], tables.pages
    numbers = slots.new_empty(4, rows)
    kv_len, table = pages.new_empty(rows), pages.new_empty(rows, width)
    locate_rows[(rows, triton.cdiv(width, _BLOCK))](
        slots,
        advance,
        tables.lengths,
        tables.last_ids,
        pages,
        tables.dropped,
        numbers,
        kv_len,
        table,
        rows,
        pages.stride(0),
        width,
        PAGE=tables.page_size,
        BLOCK=_BLOCK,
        PDL=launcher.pdl,
        num_warps=4,
        **launcher.options,
    )
    ids, positions, ends, write_index = numbers
    return Located(ids=ids, positions=positions, ends=ends, write_index=write_index, kv_len=kv_len, page_table=table)
