"""How the work of a product is cut where no table says so: rules that fit what was measured on an H200."""

from __future__ import annotations

from typing import Final

import msgspec

from .layout import TILE, counters_of

#: Rows up to which words wait in registers for x.
HELD_ROWS: Final = 4
#: Rows up to which `multiply_streamed` multiplies.
STREAMED_ROWS: Final = 16
#: Outputs from which it is ahead with any number of rows, and weights from which it is with more than `_FEWER_ROWS`.
_STREAMED_OUTPUTS: Final = 16384
_STREAMED_WEIGHTS: Final = 24_000_000
_FEWER_ROWS: Final = 2
#: Weights from which x is split into digits for it, which takes a kernel of its own.
_DIGITS_WEIGHTS: Final = 40_000_000
#: Programs up to which it splits sums.
_STREAMED_PROGRAMS: Final = 512
#: Rows up to which `multiply_rows` is ahead of `multiply_many`.
FEW_ROWS: Final = 64
#: Bytes of x that a program of `multiply_held` holds.
_HELD_BYTES: Final = 160 << 10
#: Programs up to which sums are split.
_PROGRAMS: Final = 440
#: Multiprocessors, of an H200, that `multiply_many` should fill.
_PROCESSORS: Final = 132


class HeldCut(msgspec.Struct, frozen=True, tag="held", forbid_unknown_fields=True):
    """Outputs that a program makes, warps that share its inputs, and tiles that each of them asks for before x."""

    block_n: int
    warps: int
    ahead: int


class StreamedCut(msgspec.Struct, frozen=True, tag="streamed", forbid_unknown_fields=True):
    """Outputs that a program makes, programs that share each sum, tiles whose words are asked for ahead, tiles of x in
    a copy, copies in flight, and whether x is split into digits for a product of 8-bit integers."""

    block_n: int
    split: int
    depth: int
    copied: int
    stages: int
    digits: bool


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
    #: `multiply_rows` alone, with a split of 1: the sums of blocks of outputs after the first `whole` are made by two
    #: programs, of `head` tiles and of the rest. Evens out blocks that are no multiple of the multiprocessors.
    whole: int = 0
    head: int = 0
    #: `multiply_rows` alone, with a split: programs that share a sum wait for each other, a short while, and each adds
    #: a piece of it. Gains where all programs of the product run at once.
    spread: bool = False


AnyCut = HeldCut | StreamedCut | Cut


def held_cut(rows: int, outputs: int, inputs: int) -> HeldCut | None:
    """For 1 to `HELD_ROWS` rows on Hopper and groups of whole tiles; None: `rows_cut`."""
    tiles, rows = -(-inputs // TILE), _power_of_two(rows)
    if tiles >= 64:
        cut = HeldCut(16 if outputs < 2048 else 32, 16 if rows < 4 else 8, 1 if rows == 1 else 2)
    elif rows == 1:
        cut = HeldCut(16, 8 if outputs >= 5120 else 16, 1)
    else:
        cut = HeldCut(32, 4, 4) if outputs >= 5120 else HeldCut(32, 8, 2)
    warps = min(cut.warps, 1 << (tiles.bit_length() - 1))
    turns = -(-tiles // warps)
    if rows * turns * warps * TILE * 2 > _HELD_BYTES:
        return None
    return HeldCut(cut.block_n, warps, min(cut.ahead, turns))


def streamed_columns(rows: int) -> int:
    """Rows of x that `multiply_streamed` computes for so many."""
    return 8 if rows <= 8 else STREAMED_ROWS


def streams(rows: int, outputs: int, inputs: int) -> bool:
    """Whether the rule for so many rows, up to `STREAMED_ROWS`, is `streamed_cut`, where it may be."""
    if rows > HELD_ROWS or outputs >= _STREAMED_OUTPUTS:
        return True
    return rows > _FEWER_ROWS and outputs * inputs >= _STREAMED_WEIGHTS


def streamed_cut(outputs: int, inputs: int) -> StreamedCut:
    """On Hopper, for groups of whole tiles."""
    tiles = -(-inputs // TILE)
    if outputs >= _STREAMED_OUTPUTS:
        block_n, split, copied = 128, 1, 4
    else:
        block_n, copied = 64, 2
        most = max(1, min(_STREAMED_PROGRAMS // -(-outputs // 64), tiles // 4, 16))
        # Parts of whole bodies of four tiles, if there are such
        split = next((n for n in range(most, 0, -1) if -(-tiles // n) % 4 == 0), most)
    depth = min(4, _power_of_two(tiles))
    return StreamedCut(block_n, split, depth, min(copied, depth), 2, outputs * inputs >= _DIGITS_WEIGHTS)


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
