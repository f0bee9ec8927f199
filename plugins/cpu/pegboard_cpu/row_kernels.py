"""Norm and gated activation by themselves, float32, rows shared out among the threads."""

from __future__ import annotations

from typing import Final

import numpy

from .project_kernel import add_row, gate_row, norm_row
from .vectors import get_double, get_long, kernel, team_size, thread_number

#: rows, size; x, step of its rows; weight; residual, step of its rows; out; eps, offset
NORM_LAYOUT: Final = "8q2d"
#: rows, size of the result; x, step of its rows; activation; out
GATED_LAYOUT: Final = "6q"


@kernel
def norm(call: int) -> None:
    rows, size = get_long(call, 0), get_long(call, 1)
    x, x_step, weight = get_long(call, 2), get_long(call, 3), get_long(call, 4)
    residual, residual_step, out = get_long(call, 5), get_long(call, 6), get_long(call, 7)
    eps, offset = numpy.float32(get_double(call, 8)), numpy.float32(get_double(call, 9))
    threads, thread = numpy.int64(team_size()), numpy.int64(thread_number())
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        mine = out + 4 * row * size
        norm_row(x + row * x_step, size, weight, mine, eps, offset)
        if residual != 0:
            add_row(mine, residual + row * residual_step, size)


@kernel
def gated(call: int) -> None:
    rows, size = get_long(call, 0), get_long(call, 1)
    x, x_step, activation, out = get_long(call, 2), get_long(call, 3), get_long(call, 4), get_long(call, 5)
    threads, thread = numpy.int64(team_size()), numpy.int64(thread_number())
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        gate = x + row * x_step
        gate_row(gate, gate + 4 * size, size, out + 4 * row * size, activation)
