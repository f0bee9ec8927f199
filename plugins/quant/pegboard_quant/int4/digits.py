"""Rows of x as whole numbers of two digits, for products of 8-bit integers.

Letters: M rows of x, K inputs; a tile has 128 columns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def split_digits(x, digits, factors, K, BM: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr):
    """x [M, K] -> int8 [tiles, 2, BM, 128], float32 [tiles, 2, BM]: of a row, in a tile, x = factor * (256 high + low),
    rounded by 2^-16 of the row's largest in the tile; the second factor is the first times the sum of those numbers.
    Columns of a tile are in the order of bytes of codes, see `streamed`. A number that is not finite makes both
    factors so.

    A warp takes a tile of a row. Bytes: x twice. Limit: latency."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    row = gl.program_id(0)
    tile = gl.program_id(1) * num_warps + gl.arange(0, num_warps, gl.SliceLayout(1, LANES))
    k = gl.arange(0, 128, gl.SliceLayout(0, LANES))
    column = tile[:, None] * 128 + ((k & 96) | ((k & 31) >> 1) | ((k & 1) << 4))[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    v = gl.load(x + row.to(gl.int64) * K + column, mask=column < K, other=0.0).to(gl.float32)
    # As whole numbers, absolute values have the same order, with NaN the largest
    most = gl.max(v.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(gl.float32, bitcast=True)
    # Adding 1.5 * 2^23 rounds to a whole number, which is then in the lowest 16 bits
    rounded = v * (32512.0 / gl.maximum(most, 1e-30))[:, None] + 12582912.0
    number = (rounded.to(gl.int32, bitcast=True) << 16) >> 16
    high = (number + 128) >> 8
    factor = most / 32512.0
    there = tile * 128 < K
    at = digits + (tile[:, None] * 2 * BM + row) * 128 + k[None, :]
    gl.store(at, high.to(gl.int8), mask=there[:, None])
    gl.store(at + BM * 128, (number - (high << 8)).to(gl.int8), mask=there[:, None])
    gl.store(factors + tile * 2 * BM + row, factor, mask=there)
    gl.store(factors + (tile * 2 + 1) * BM + row, factor * gl.sum(number, 1).to(gl.float32), mask=there)
