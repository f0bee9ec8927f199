"""Norm and gated activation by themselves, float32, rows shared out among the threads."""

from __future__ import annotations

from typing import Any, Final

import numpy
from numba import carray, cfunc

from .project_kernel import gate_row, norm_row
from .vectors import floats, thread_number

#: threads, rows, size; x, step of its rows; weight; residual, step of its rows; out; eps, offset
NORM_LAYOUT: Final = "9q2d"
_NORM_COUNT: Final = 11
#: threads, rows, size of the result; x, step of its rows; activation; out
GATED_LAYOUT: Final = "7q"
_GATED_COUNT: Final = 7


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def norm(call: Any) -> None:
    a, real = carray(call, (_NORM_COUNT,), numpy.int64), carray(call, (_NORM_COUNT,), numpy.float64)
    threads, rows, size, x, x_step, weight = a[0], a[1], a[2], a[3], a[4], a[5]
    residual, residual_step, out = a[6], a[7], a[8]
    eps, offset = numpy.float32(real[9]), numpy.float32(real[10])
    share = (rows + threads - 1) // threads
    first = numpy.int64(thread_number()) * share
    for row in range(first, min(first + share, rows)):
        mine = floats(out + 4 * row * size, size)
        norm_row(floats(x + row * x_step, size), floats(weight, size), mine, eps, offset)
        if residual != 0:
            other = floats(residual + row * residual_step, size)
            for i in range(size):
                mine[i] += other[i]


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def gated(call: Any) -> None:
    a = carray(call, (_GATED_COUNT,), numpy.int64)
    threads, rows, size, x, x_step, activation, out = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    share = (rows + threads - 1) // threads
    first = numpy.int64(thread_number()) * share
    for row in range(first, min(first + share, rows)):
        gate, up = floats(x + row * x_step, size), floats(x + row * x_step + 4 * size, size)
        gate_row(gate, up, floats(out + 4 * row * size, size), activation)
