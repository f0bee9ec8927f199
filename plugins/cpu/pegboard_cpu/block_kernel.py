"""residual + act(norm(x) W^T + b) over weights in GGUF blocks, x rounded to bytes with a scale a block of 32.

Letters: T rows, I input features, O output features of the result (the weight has 2 O where it is gated).
"""

from __future__ import annotations

from typing import Any, Final

import numpy

from .block_kinds import BLOCK, LANES
from .block_rows import round_block, round_halves
from .block_tiles import ROWS, block_tile
from .project_kernel import add_row, gate_row, norm_row
from .vectors import barrier, get, get_double, get_long, inner, kernel, put, team_size, thread_number

#: Tiles whose results are finished together: their weights are read from the second level of the cache when there are
#: more rows than one tile has.
_RUN: Final = 8
#: Features of a run.
_FEATURES: Final = _RUN * LANES
#: float32 numbers of scratch that a thread needs: both halves of a gated run.
SCRATCH: Final = 2 * ROWS * _FEATURES
#: T, I, O; x, step of its rows; records, bytes of a tile's, their kind; bias; activation; residual, step of its rows;
#: norm's weight; prepared rows [1 or threads, T], bytes of one; scratch; out, step of its rows; zero, sums of a block;
#: eps, offset
LAYOUT: Final = "20q2d"

_four, _one = block_tile(ROWS), block_tile(1)


def row_bytes(size: int) -> int:
    """Of a prepared row: its bytes, scales and sums, of which a block has one or two, then room for the normed row,
    rounded up to cache lines."""
    return -(-(size + 12 * (size // BLOCK) + 4 * size) // 64) * 64


@inner()
def _prepare(
    first: int,
    last: int,
    x: int,
    x_step: int,
    size: int,
    norm: int,
    eps: Any,
    offset: Any,
    out: int,
    step: int,
    zero: int,
    sums: int,
) -> None:
    """Rows first .. last - 1, normed if they are to be, rounded, with so many sums a block."""
    blocks = size // BLOCK
    for row in range(first, last):
        source, mine = x + row * x_step, out + row * step
        scales = mine + size
        totals = scales + 4 * blocks
        if norm != 0:
            normed = totals + 8 * blocks
            norm_row(source, size, norm, normed, eps, offset)
            source = normed
        for block in range(blocks):
            part, target, scale = source + 4 * BLOCK * block, mine + BLOCK * block, scales + 4 * block
            if sums == 1:
                round_block(part, target, scale, totals + 4 * block, zero)
            else:
                round_halves(part, target, scale, totals + 8 * block, zero)


@inner()
def _tiles(kind: int, rows: int, count: int, x: int, x_step: int, w: int, w_step: int, blocks: int, out: int) -> None:
    """out[:rows, :count LANES], rows of it _FEATURES apart; four rows at once, else one."""
    for tile in range(count):
        place, weights = out + 4 * LANES * tile, w + tile * w_step
        if rows == ROWS:
            _four(x, x_step, weights, kind, blocks, place, 4 * _FEATURES)
        else:
            for row in range(rows):
                _one(x + row * x_step, x_step, weights, kind, blocks, place + 4 * _FEATURES * row, 0)


@inner()
def _copy_row(source: int, size: int, out: int) -> None:
    for i in range(size):
        put(out, i, get(source, i))


@kernel
def project_blocks(call: int) -> None:
    rows, size, features = get_long(call, 0), get_long(call, 1), get_long(call, 2)
    x, x_step, weight, w_step = get_long(call, 3), get_long(call, 4), get_long(call, 5), get_long(call, 6)
    kind, bias, activation = get_long(call, 7), get_long(call, 8), get_long(call, 9)
    residual, residual_step, norm = get_long(call, 10), get_long(call, 11), get_long(call, 12)
    prepared, prepared_step, out, out_step = (
        get_long(call, 13),
        get_long(call, 14),
        get_long(call, 16),
        get_long(call, 17),
    )
    zero, sums = get_long(call, 18), get_long(call, 19)
    eps, offset = numpy.float32(get_double(call, 20)), numpy.float32(get_double(call, 21))
    threads, thread = numpy.int64(team_size()), numpy.int64(thread_number())
    scratch = get_long(call, 15) + 4 * thread * SCRATCH
    # Few rows: each thread for itself, which is cheaper than to wait for each other
    shared = rows >= 2 * threads
    if not shared:
        prepared += thread * rows * prepared_step
    first = rows * thread // threads if shared else 0
    last = rows * (thread + 1) // threads if shared else rows
    _prepare(first, last, x, x_step, size, norm, eps, offset, prepared, prepared_step, zero, sums)
    if shared:
        barrier()
    blocks, tiles = size // BLOCK, (features + LANES - 1) // LANES
    first, last = tiles * thread // threads, tiles * (thread + 1) // threads
    up = weight + features // LANES * w_step  # where gated, features are whole tiles
    gated = scratch + 4 * ROWS * _FEATURES
    for run in range(first, last, _RUN):
        count = last - run if last - run < _RUN else _RUN
        feature = run * LANES
        width = count * LANES if feature + count * LANES <= features else features - feature
        for start in range(0, rows, ROWS):
            group = rows - start if rows - start < ROWS else ROWS
            source = prepared + start * prepared_step
            _tiles(kind, group, count, source, prepared_step, weight + run * w_step, w_step, blocks, scratch)
            if activation != 0:
                _tiles(kind, group, count, source, prepared_step, up + run * w_step, w_step, blocks, gated)
            for row in range(group):
                mine, target = scratch + 4 * _FEATURES * row, out + (start + row) * out_step + 4 * feature
                if bias != 0:
                    add_row(mine, bias + 4 * feature, width)
                if activation != 0:
                    other = gated + 4 * _FEATURES * row
                    if bias != 0:
                        add_row(other, bias + 4 * (features + feature), width)
                    gate_row(mine, other, width, target, activation)
                else:
                    _copy_row(mine, width, target)
                if residual != 0:
                    add_row(target, residual + (start + row) * residual_step + 4 * feature, width)
