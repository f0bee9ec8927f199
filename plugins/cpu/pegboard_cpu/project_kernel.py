"""residual + act(norm(x) W^T + b) for few rows of float32, the weight read once, in its own order.

Letters: T rows, I input features, O output features of the result (the weight has 2 O where it is gated).
"""

from __future__ import annotations

from typing import Any, Final

import numpy
from numba import carray, cfunc, njit

from .functions import GELU_TANH, SILU, gelu, gelu_tanh, silu
from .vectors import FAST, FEATURES, ROWS, floats, products_tile, thread_number

#: How many tiles ahead weights are fetched: about 13 KiB at 576 input features.
_AHEAD: Final = 6 // FEATURES
_four = products_tile(FEATURES, 4, ahead=_AHEAD)
_three = products_tile(FEATURES, 3, ahead=_AHEAD)
_two = products_tile(FEATURES, 2, ahead=_AHEAD)
_one = products_tile(FEATURES, 1, ahead=_AHEAD)

#: threads, T, I, O; x, step of its rows; weight, bias; activation; residual, step of its rows; norm's weight, its
#: scratch; scratch of a gated product [T, 2 O]; out; eps, offset
LAYOUT: Final = "15q2d"
_COUNT: Final = 17


@njit
def _products(
    x: int, x_step: int, rows: int, size: int, weight: int, first: int, end: int, out: int, out_step: int
) -> None:
    """out[:, first:end] = x W[first:end]^T; steps in bytes, end - first at least FEATURES."""
    step = 4 * size
    feature = first
    while feature < end:
        at = min(feature, end - FEATURES)  # the last tile does some again
        w, place = weight + at * step, out + 4 * at
        row = 0
        while row + ROWS <= rows:
            _four(x + row * x_step, x_step, w, step, size, place + row * out_step, out_step)
            row += ROWS
        if rows - row == 3:
            _three(x + row * x_step, x_step, w, step, size, place + row * out_step, out_step)
        elif rows - row == 2:
            _two(x + row * x_step, x_step, w, step, size, place + row * out_step, out_step)
        elif rows - row == 1:
            _one(x + row * x_step, x_step, w, step, size, place + row * out_step, out_step)
        feature += FEATURES


@njit(fastmath=FAST)
def norm_row(x: Any, weight: Any, out: Any, eps: Any, offset: Any) -> None:
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset)"""
    total = numpy.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = numpy.float32(1) / numpy.sqrt(total / numpy.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * (weight[i] + offset)


@njit(fastmath={"contract"})
def gate_row(gate: Any, up: Any, out: Any, activation: int) -> None:
    """out = act(gate) * up"""
    if activation == SILU:
        for i in range(out.shape[0]):
            out[i] = silu(gate[i]) * up[i]
    elif activation == GELU_TANH:
        for i in range(out.shape[0]):
            out[i] = gelu_tanh(gate[i]) * up[i]
    else:
        for i in range(out.shape[0]):
            out[i] = gelu(gate[i]) * up[i]


@njit
def _add_row(out: Any, other: Any) -> None:
    for i in range(out.shape[0]):
        out[i] += other[i]


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def project(call: Any) -> None:
    a, real = carray(call, (_COUNT,), numpy.int64), carray(call, (_COUNT,), numpy.float64)
    threads, rows, size, features, x, x_step, weight, bias, activation = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]
    residual, residual_step, norm_weight, normed, wide, out = a[9], a[10], a[11], a[12], a[13], a[14]
    # Whole tiles, shared out evenly; the last thread that has any takes the rest of the features as well
    thread, tiles = numpy.int64(thread_number()), features // FEATURES
    share = (tiles + threads - 1) // threads
    first, last = min(thread * share, tiles), min((thread + 1) * share, tiles)
    if first == last:
        return
    first, end = first * FEATURES, features if last == tiles else last * FEATURES
    if norm_weight != 0:
        # Each thread for itself: cheaper than to wait for each other
        normed += thread * rows * size * 4
        eps, offset = numpy.float32(real[15]), numpy.float32(real[16])
        for row in range(rows):
            norm_row(floats(x + row * x_step, size), floats(norm_weight, size), floats(normed + 4 * row * size, size), eps, offset)
        x, x_step = normed, 4 * size
    step, count = 4 * features, end - first
    if activation == 0:
        _products(x, x_step, rows, size, weight, first, end, out, step)
    else:
        _products(x, x_step, rows, size, weight, first, end, wide, 2 * step)
        _products(x, x_step, rows, size, weight + size * step, first, end, wide + step, 2 * step)
    for row in range(rows):
        mine = floats(out + row * step + 4 * first, count)
        if activation != 0:
            gate = floats(wide + row * 2 * step + 4 * first, count)
            up = floats(wide + row * 2 * step + step + 4 * first, count)
            if bias != 0:
                _add_row(gate, floats(bias + 4 * first, count))
                _add_row(up, floats(bias + step + 4 * first, count))
            gate_row(gate, up, mine, activation)
        elif bias != 0:
            _add_row(mine, floats(bias + 4 * first, count))
        if residual != 0:
            _add_row(mine, floats(residual + row * residual_step + 4 * first, count))
