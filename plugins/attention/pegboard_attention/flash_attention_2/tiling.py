"""Sizes of tiles and blocks, by shape. Measured once, chosen by table: serving never tunes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    """Rows (queries x heads) of a tile, entries of a block, and how the kernel is compiled for them."""

    rows: int
    block: int
    warps: int
    stages: int


def padded_width(head_size: int) -> int:
    """Columns of a tile in registers: a power of two, of which those behind the head are masked."""
    return max(16, 1 << (head_size - 1).bit_length())


def portable_tiling(head_size: int, capability: tuple[int, int] | None) -> Tiling:
    """For the portable kernel; what neither spills registers nor needs more than the 99 KiB of shared memory that the
    smallest GPUs of sm_8x have."""
    width = padded_width(head_size)
    if width > 128:
        return Tiling(rows=64, block=32, warps=8, stages=2)
    if width > 64 and (capability is None or capability < (9, 0)):
        return Tiling(rows=128, block=32, warps=8, stages=3)
    return Tiling(rows=128, block=64, warps=8, stages=2)


def hopper_tiling(head_size: int) -> Tiling:
    """For the Hopper kernel: two warpgroups of 64 rows."""
    return Tiling(rows=128, block=128, warps=4, stages=2 if padded_width(head_size) > 64 else 4)


def backward_tilings(head_size: int) -> tuple[Tiling, Tiling]:
    """For the gradients of K and V, and of Q. The former hold four tiles in registers, and would spill if loads ran
    ahead."""
    side = 64 if padded_width(head_size) <= 128 else 32
    return Tiling(side, side, warps=8, stages=1), Tiling(side, side, warps=8, stages=2)
