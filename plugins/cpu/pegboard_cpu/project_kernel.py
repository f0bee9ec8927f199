"""residual + act(norm(x) W^T + b) for few rows of float32, the weight read once, in its own order.

Letters: T rows, I input features, O output features of the result (the weight has 2 O where it is gated).
"""

from __future__ import annotations

from typing import Any, Final

import numpy

from .functions import GELU_TANH, SILU, gelu, gelu_tanh, silu
from .tiles import FEATURES, ROWS, products_tile
from .vectors import FAST, get, get_double, get_long, inner, kernel, put, team_size, thread_number

#: How many tiles ahead weights are fetched: about 13 KiB at 576 input features.
_AHEAD: Final = 6 // FEATURES
_four = products_tile(FEATURES, 4, ahead=_AHEAD)
_three = products_tile(FEATURES, 3, ahead=_AHEAD)
_two = products_tile(FEATURES, 2, ahead=_AHEAD)
_one = products_tile(FEATURES, 1, ahead=_AHEAD)

#: T, I, O; x, step of its rows; weight, bias; activation; residual, step of its rows; norm's weight, its
#: scratch; scratch of a gated product [T, 2 O]; out; eps, offset
LAYOUT: Final = "14q2d"


@inner()
def _products(
    x: int, x_step: int, rows: int, size: int, weight: int, first: int, end: int, out: int, out_step: int
) -> None:
    """out[:, first:end] = x W[first:end]^T; steps in bytes, end - first at least FEATURES."""
    step = 4 * size
    feature = first
    while feature < end:
        at = feature if feature + FEATURES <= end else end - FEATURES  # the last tile does some again
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


@inner(fastmath=FAST)
def norm_row(x: int, size: int, weight: int, out: int, eps: Any, offset: Any) -> None:
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset)"""
    total = numpy.float32(0)
    for i in range(size):
        total += get(x, i) * get(x, i)
    factor = numpy.float32(1) / numpy.sqrt(total / numpy.float32(size) + eps)
    for i in range(size):
        put(out, i, get(x, i) * factor * (get(weight, i) + offset))


@inner(fastmath={"contract"})
def gate_row(gate: int, up: int, size: int, out: int, activation: int) -> None:
    """out = act(gate) * up"""
    if activation == SILU:
        for i in range(size):
            put(out, i, silu(get(gate, i)) * get(up, i))
    elif activation == GELU_TANH:
        for i in range(size):
            put(out, i, gelu_tanh(get(gate, i)) * get(up, i))
    else:
        for i in range(size):
            put(out, i, gelu(get(gate, i)) * get(up, i))


@inner()
def add_row(out: int, other: int, size: int) -> None:
    for i in range(size):
        put(out, i, get(out, i) + get(other, i))


@kernel
def project(call: int) -> None:
    rows, size, features = get_long(call, 0), get_long(call, 1), get_long(call, 2)
    x, x_step, weight, bias = get_long(call, 3), get_long(call, 4), get_long(call, 5), get_long(call, 6)
    activation, residual, residual_step = get_long(call, 7), get_long(call, 8), get_long(call, 9)
    norm_weight, normed, wide, out = get_long(call, 10), get_long(call, 11), get_long(call, 12), get_long(call, 13)
    eps, offset = numpy.float32(get_double(call, 14)), numpy.float32(get_double(call, 15))
    # Whole tiles, shared out evenly; the last thread that has any takes the rest of the features as well
    threads, thread, tiles = numpy.int64(team_size()), numpy.int64(thread_number()), features // FEATURES
    first, last = tiles * thread // threads, tiles * (thread + 1) // threads
    if first == last:
        return
    first, end = first * FEATURES, features if last == tiles else last * FEATURES
    if norm_weight != 0:
        # Each thread for itself: cheaper than to wait for each other
        normed += thread * rows * size * 4
        for row in range(rows):
            norm_row(x + row * x_step, size, norm_weight, normed + 4 * row * size, eps, offset)
        x, x_step = normed, 4 * size
    step, count = 4 * features, end - first
    if activation == 0:
        _products(x, x_step, rows, size, weight, first, end, out, step)
    else:
        _products(x, x_step, rows, size, weight, first, end, wide, 2 * step)
        _products(x, x_step, rows, size, weight + size * step, first, end, wide + step, 2 * step)
    for row in range(rows):
        mine = out + row * step + 4 * first
        if activation != 0:
            gate = wide + 2 * row * step + 4 * first
            if bias != 0:
                add_row(gate, bias + 4 * first, count)
                add_row(gate + step, bias + step + 4 * first, count)
            gate_row(gate, gate + step, count, mine, activation)
        elif bias != 0:
            add_row(mine, bias + 4 * first, count)
        if residual != 0:
            add_row(mine, residual + row * residual_step + 4 * first, count)
