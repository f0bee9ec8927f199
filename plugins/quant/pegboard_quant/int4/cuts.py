"""How the work of a product is cut where no table says so: rules that fit what was measured on an H200."""

from __future__ import annotations

from math import ceil
from typing import Final

import msgspec

from .layout import TILE, counters_of

#: Rows up to which words wait in registers for x.
HELD_ROWS: Final = 4
#: Rows up to which `multiply_resident` keeps x in shared memory, and up to which rules take it.
RESIDENT_ROWS: Final = 16
_RESIDENT_RULE: Final = 8
#: Tiles of x that a program keeps by that rule, at most.
_RESIDENT_TILES: Final = 32
#: Rows up to which `multiply_rows` is ahead of `multiply_many`.
FEW_ROWS: Final = 64
#: Outputs of a warp of `multiply_resident`.
RESIDENT_OUTPUTS: Final = 16
#: Bytes of x that a program of `multiply_held` holds.
_HELD_BYTES: Final = 160 << 10
#: Programs up to which sums are split.
_PROGRAMS: Final = 440
#: Multiprocessors, of an H200, that `multiply_resident` and `multiply_many` should fill.
_PROCESSORS: Final = 132


class HeldCut(msgspec.Struct, frozen=True, tag="held", forbid_unknown_fields=True):
    """Outputs that a program makes, warps that share its inputs, and tiles that each of them asks for before x."""

    block_n: int
    warps: int
    ahead: int


class ResidentCut(msgspec.Struct, frozen=True, tag="resident", forbid_unknown_fields=True):
    """Warps that share the inputs of 16 outputs, warps beside them with other outputs, programs that share the inputs
    of outputs, tiles that a warp asks for ahead, and programs in all, the shared ones counted apart."""

    inputs_warps: int
    outputs_warps: int
    split: int
    depth: int
    programs: int

    @property
    def warps(self) -> int:
        return self.inputs_warps * self.outputs_warps

    def held(self, inputs: int) -> int:
        """Tiles of x that a program has memory for."""
        tiles = -(-inputs // TILE)
        return max(self.warps, _power_of_two(-(-tiles // self.split)))

    def slots(self, outputs: int) -> int:
        """Programs with outputs of their own."""
        return min(-(-outputs // RESIDENT_OUTPUTS), self.programs // self.split)


class Cut(msgspec.Struct, frozen=True, tag="blocks", forbid_unknown_fields=True):
    """Outputs and rows that a program takes, programs that share each sum, and tiles that are asked for ahead."""

    block_n: int
    block_m: int
    split: int
    stages: int
    #: `multiply_many` takes up to `FEW_ROWS` rows, too. More are always its own.
    overlapped: bool = False
    #: `multiply_rows` alone: tiles that it asks the L2 for before the wait for x, and whether the next kernel may start
    #: while it multiplies.
    fetched: int = 0
    early: bool = False


AnyCut = HeldCut | ResidentCut | Cut


def held_cut(rows: int, outputs: int, inputs: int) -> HeldCut | None:
    """For 1 to `HELD_ROWS` rows on Hopper and groups of whole tiles; None: `rows_cut`."""
    tiles, rows = -(-inputs // TILE), _power_of_two(rows)
    many = outputs >= 16384
    if tiles >= 64:
        cut = HeldCut(16 if outputs < 2048 else 32, 16 if rows < 4 else 8, 1 if rows == 1 else 2)
    elif rows == 1:
        cut = HeldCut(16, 4, 3) if many else HeldCut(16, 8, 1) if outputs >= 5120 else HeldCut(16, 16, 1)
    elif many and rows > 2:
        return None
    else:
        cut = HeldCut(32, 4, 4) if outputs >= 5120 else HeldCut(32, 8, 2)
    warps = min(cut.warps, 1 << (tiles.bit_length() - 1))
    turns = -(-tiles // warps)
    if rows * turns * warps * TILE * 2 > _HELD_BYTES:
        return None
    return HeldCut(cut.block_n, warps, min(cut.ahead, turns))


def resident_columns(rows: int) -> int:
    """Rows of x that `multiply_resident` computes for so many."""
    return 8 if rows <= 8 else RESIDENT_ROWS


def resident_cut(rows: int, outputs: int, inputs: int) -> ResidentCut | None:
    """For up to 8 rows on Hopper, groups of whole tiles and inputs of such; None: `rows_cut`."""
    tiles = -(-inputs // TILE)
    if rows > _RESIDENT_RULE or inputs % TILE or tiles < 16 or outputs < 2048:
        return None
    split = -(-tiles // _RESIDENT_TILES)
    part = -(-tiles // split)
    each = -(-outputs // RESIDENT_OUTPUTS) * split / _PROCESSORS
    beside = next((n for n in (16, 8, 4, 2) if each >= 0.8 * n * ceil(each / n)), 1)
    shared = 16 // beside
    depth = 4 if part % (4 * shared) == 0 else min(2, -(-part // shared))
    if split > 1:
        return ResidentCut(shared, beside, split, depth, min(_PROCESSORS, counters_of(outputs) * split))
    return ResidentCut(shared, beside, split, depth, _PROCESSORS)


def rows_cut(rows: int, outputs: int, inputs: int, group: int, *, wide: bool) -> Cut:
    """`wide`: since Hopper, whose products take x from shared memory. Before, more than 32 rows of it don't fit into
    registers beside the weight; 128 outputs of short groups neither."""
    block_m = min(64 if wide else 32, max(16, _power_of_two(rows)))
    wide &= group >= TILE
    block_n = 128 if wide and outputs >= 8192 else 64
    programs = -(-outputs // block_n)
    split = 1 if rows > block_m else max(1, min(_PROGRAMS // programs, -(-inputs // TILE) // 4, 16))
    return Cut(block_n, block_m, split, 4 if block_m == 16 else 3)


def many_cut(rows: int, outputs: int, inputs: int) -> Cut:
    """For more than 64 rows on Hopper and groups of whole tiles. Blocks of 256 rows leave room for one program on a
    multiprocessor, those of 128 for two."""
    block_m, room = (128, 2 * _PROCESSORS) if rows <= 128 else (256, _PROCESSORS)
    row_blocks = -(-rows // block_m)
    block_n = 128 if block_m == 256 and row_blocks * outputs >= _PROCESSORS * 128 * 2 // 3 else 64
    programs = row_blocks * -(-outputs // block_n)
    split = max(1, min(room // programs, 8, -(-inputs // TILE) // 8))
    if programs > counters_of(outputs):
        split = 1  # there are no counters for so many
    return Cut(block_n, block_m, split, 3)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
