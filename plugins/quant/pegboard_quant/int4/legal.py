"""Which cuts a device can run, and which of them are worth a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

import msgspec

from .cuts import (
    FEW_ROWS,
    HELD_ROWS,
    STREAMED_ROWS,
    AnyCut,
    Cut,
    HeldCut,
    StreamedCut,
    streamed_columns,
)
from .layout import TILE, counters_of

#: Bytes of shared memory that a program may use for all of x, and for the tiles in flight.
_HELD_BYTES: Final = 160 << 10
_STAGED_BYTES: Final = 192 << 10
#: (stages, overlapped, fetched, early) of up to `FEW_ROWS` rows, and of more.
_STAGED: Final = (
    (3, False, 0, False),
    (3, False, 2, False),
    (3, False, 2, True),
    (4, False, 0, False),
    (4, False, 2, True),
    (6, False, 0, False),
    (3, True, 0, False),
    (6, True, 0, False),
)
_STAGED_MANY: Final = ((3, False, 0, False),)
#: The same of cuts whose sums are added by all of their programs, and programs for each multiprocessor up to which they
#: may all run at once.
_STAGED_SPREAD: Final = ((3, False, 2, False), (3, False, 2, True), (4, False, 2, True))
_PROGRAMS_AT_ONCE: Final = 4
#: Of uneven cuts, and tiles of their heads, in sixteenths.
_STAGED_UNEVEN: Final = ((3, False, 2, True), (4, False, 2, True))
_HEADS: Final = (12, 13, 14)
#: (outputs, depth, tiles of x in a copy, copies) of `multiply_streamed`.
_STREAMED: Final = ((64, 4, 1, 2), (64, 4, 2, 2), (64, 4, 4, 1), (128, 4, 4, 2))
#: Programs for each multiprocessor up to which sums are split.
_MOST_PROGRAMS: Final = 6
_SPLITS: Final = (1, 2, 3, 4, 5, 6, 7, 8)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A product that a cut is for."""

    outputs: int
    inputs: int
    #: As the kernels see it: 32, 64, or a multiple of 128.
    group: int
    #: It serves up to so many.
    rows: int

    @property
    def tiles(self) -> int:
        return -(-self.inputs // TILE)


def illegal(cut: AnyCut, place: Place, capability: tuple[int, int]) -> str | None:
    """Why the kernels can't, or None."""
    hopper, whole = capability[0] == 9, place.group >= TILE
    if isinstance(cut, HeldCut):
        if not hopper or not whole or place.rows > HELD_ROWS:
            return f"held cuts are for Hopper, groups of 128 and more and up to {HELD_ROWS} rows"
        turns = -(-place.tiles // max(1, cut.warps))
        held = place.rows * turns * cut.warps * TILE * 2
        if cut.block_n not in (16, 32) or cut.warps not in (1, 2, 4, 8, 16) or cut.warps > place.tiles:
            return f"held cuts have a block_n of 16 or 32 and 1, 2, 4, 8 or 16 warps, up to {place.tiles} of them here"
        if not 1 <= cut.ahead <= turns or held > _HELD_BYTES:
            return f"ahead must be 1 to {turns} here, and x, of {held} bytes, no more than {_HELD_BYTES}"
        return None
    if isinstance(cut, StreamedCut):
        return _illegal_streamed(cut, place, hopper=hopper)
    return _illegal_blocks(cut, place, capability)


def _illegal_streamed(cut: StreamedCut, place: Place, *, hopper: bool) -> str | None:
    if not hopper or place.group < TILE or place.inputs % 8 or place.rows > STREAMED_ROWS:
        return f"streamed cuts are for Hopper, groups of 128 and more, inputs of 8, and up to {STREAMED_ROWS} rows"
    if cut.block_n not in (64, 128) or cut.depth not in (1, 2, 4) or cut.copied not in (1, 2, 4):
        return "block_n must be 64 or 128, and depth and copied be 1, 2 or 4"
    if cut.copied > cut.depth or not 1 <= cut.stages <= 8:
        return "copied must be no more than depth, and stages be 1 to 8"
    if not 1 <= cut.split <= min(16, place.tiles):
        return f"split must be 1 to {min(16, place.tiles)} here"
    columns = streamed_columns(place.rows)
    part = -(-place.tiles // cut.split) + cut.depth
    held = columns * (TILE * 2 * cut.copied * cut.stages + (16 * part if cut.digits else 0))
    if held > _STAGED_BYTES:
        return f"copies of x, and its factors, of {held} bytes, must be no more than {_STAGED_BYTES}"
    return None


def _illegal_blocks(cut: Cut, place: Place, capability: tuple[int, int]) -> str | None:
    hopper, wide, whole = capability[0] == 9, capability >= (9, 0), place.group >= TILE
    if cut.overlapped or cut.block_m > FEW_ROWS:
        if not hopper or not whole or place.inputs % 8:
            return (
                "more than 64 rows a program, or overlapped: only on Hopper, with groups of 128 and more, inputs of 8"
            )
        blocks_n, blocks_m, tile_bytes = [64, 128], [16, 32, 64, 128, 256], cut.block_m * TILE * 2
    else:
        blocks_n = [64, 128] if wide and whole else [64]
        blocks_m = [16, 32, 64] if wide else [16, 32]
        tile_bytes = cut.block_n * TILE // 2 + cut.block_m * TILE * 2
    if cut.block_n not in blocks_n or cut.block_m not in blocks_m:
        return f"block_n must be one of {_listed(blocks_n)}, block_m one of {_listed(blocks_m)} here"
    own = cut.overlapped or cut.block_m > FEW_ROWS
    if own and (cut.fetched or cut.early or cut.whole or cut.head or cut.spread):
        return "fetched, early, whole, head and spread must be left out of more than 64 rows a program, or overlapped"
    if not 0 <= cut.fetched <= 4 or cut.fetched & (cut.fetched - 1):
        return "fetched must be 0, 1, 2 or 4"
    if not 2 <= cut.stages <= 6 or cut.stages * tile_bytes > _STAGED_BYTES:
        return "stages must be 2 to 6, with no more than 192 KiB of tiles in flight"
    counters = counters_of(place.outputs)
    blocks = -(-place.outputs // cut.block_n)
    parts = blocks * -(-place.rows // cut.block_m)
    if not 1 <= cut.split <= min(16, place.tiles) or ((cut.split > 1 or cut.head) and parts > counters):
        return f"split must be 1 to {min(16, place.tiles)} here, and 1, and no head, for more than {counters} sums"
    if cut.spread and cut.split == 1:
        return "spread needs a split"
    uneven = cut.split == 1 and 0 < cut.head < place.tiles and 0 <= cut.whole < blocks
    if (cut.head or cut.whole) and not uneven:
        return f"head must be less than {place.tiles} and whole than {blocks} here, and split be 1"
    return None


def candidates(place: Place, capability: tuple[int, int], processors: int) -> Iterator[AnyCut]:
    """Legal cuts, in a fixed order, for a device of so many multiprocessors."""
    if place.rows <= HELD_ROWS:
        for held in (HeldCut(*fields) for fields in product((16, 32), (4, 8, 16), (1, 2, 4))):
            if illegal(held, place, capability) is None:
                yield held
    many = capability[0] == 9 and place.group >= TILE and place.inputs % 8 == 0
    if many and place.rows <= STREAMED_ROWS:
        for (block_n, depth, copied, stages), split, digits in product(_STREAMED, _SPLITS, (False, True)):
            streamed = StreamedCut(block_n, split, depth, copied, stages, digits)
            crowded = split > 1 and -(-place.outputs // block_n) * split > _MOST_PROGRAMS * processors
            if not crowded and illegal(streamed, place, capability) is None:
                yield streamed
        return  # the kernel of blocks was behind wherever both were measured
    most = 256 if many else 64 if capability >= (9, 0) else 32
    block_m = min(1 << max(4, (place.rows - 1).bit_length()), most)
    for block_n, split in product((64, 128), (1, 2, 4, 6, 8, 16)):
        programs = -(-place.outputs // block_n) * -(-place.rows // block_m) * split
        if split > 1 and programs > _MOST_PROGRAMS * processors:
            continue
        cuts = [Cut(block_n, block_m, split, *staged) for staged in (_STAGED if block_m <= FEW_ROWS else _STAGED_MANY)]
        if split > 1 and block_m <= FEW_ROWS and programs <= _PROGRAMS_AT_ONCE * processors:
            cuts += [Cut(block_n, block_m, split, *staged, spread=True) for staged in _STAGED_SPREAD]
        yield from (cut for cut in cuts if illegal(cut, place, capability) is None)
    if block_m <= FEW_ROWS:
        yield from _uneven(place, block_m, capability, processors)


def _uneven(place: Place, block_m: int, capability: tuple[int, int], processors: int) -> Iterator[Cut]:
    """Where some multiprocessors have one block and others two."""
    for block_n, staged, sixteenths in product((64, 128), _STAGED_UNEVEN, _HEADS):
        cut = Cut(block_n, block_m, 1, *staged, whole=processors, head=place.tiles * sixteenths // 16)
        if processors < -(-place.outputs // block_n) < 2 * processors and illegal(cut, place, capability) is None:
            yield cut


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
