"""Rows of the embedding table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from .launching import Launcher


@triton.jit
def gather_rows(ids_ptr, table_ptr, out_ptr, table_row, E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (tokens, blocks of E)."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(ids_ptr + token)
    numbers = tl.load(table_ptr + row * table_row + e, mask=e < E)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + token * E + e, numbers, mask=e < E)


def launch_embed(ids: Tensor, table: Tensor, launcher: Launcher) -> Tensor:
    """ids [T] int64, table [V, E] with dense rows -> [T, E]. Ids must be in range: nothing checks them on the device.

    Reference: torch.nn.functional.embedding, bit for bit. Bytes: E read and written a token."""
    size = table.shape[1]
    out = table.new_empty(ids.shape[0], size)
    block = min(1024, triton.next_power_of_2(size))
    gather_rows[(ids.shape[0], triton.cdiv(size, block))](
        ids, table, out, table.stride(0), E=size, BLOCK=block, PDL=launcher.pdl, num_warps=4, **launcher.options
    )
    return out
