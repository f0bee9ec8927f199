"""Sizes of tiles and blocks, by shape. Measured once, chosen by table: serving never tunes."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Tiling:
    """Rows (queries x heads) of a tile, entries of a block, and how the kernel is compiled for them."""

    rows: int
    block: int
    warps: int
    stages: int


def padded_width(head_size: int) -> int:
    """Columns of a tile in registers: a power of two, of which those behind the head are masked."""
    return max(16, triton.next_power_of_2(head_size))


def portable_tiling(head_size: int) -> Tiling:
    """For the portable kernel. Fits the 99 KiB of shared memory that the smallest GPUs of sm_8x have."""
    if padded_width(head_size) <= 128:
        return Tiling(rows=128, block=64, warps=8, stages=2)
    return Tiling(rows=64, block=32, warps=4, stages=2)


def hopper_tiling(head_size: int) -> Tiling:
    """For the Hopper kernel: two warpgroups of 64 rows."""
    return Tiling(rows=128, block=128, warps=4, stages=2 if padded_width(head_size) > 64 else 4)
