"""What the host works out of a step's rows is kept while they are the same, and only then."""

from __future__ import annotations

from typing import Any

import numpy
from msgspec.structs import replace

from pegboard.contracts.scheduler import RowPlan
from pegboard.runner.batching import pack
from pegboard.runner.preparing import Preparing
from pegboard.runner.step_shape import Limits, exact_shape, padded_shape, split_rows

LIMITS = Limits(rows=8, step_tokens=64, length=4096, decode_width=1)
IDLE = 8


def fed(slot: int, **fields: Any) -> RowPlan:
    return RowPlan(**{"id": f"s{slot}", "slot": slot, "query": 1, "start": 4000, "tokens": ()} | fields)


def test_the_same_rows_are_looked_at_once_and_reach_further() -> None:
    preparing = Preparing(LIMITS, IDLE)
    rows = tuple(fed(slot) for slot in range(5))
    first = preparing.look_at(rows, 100)
    packed = preparing.pack(first, padded_shape(first.exact, LIMITS))
    second = preparing.look_at(tuple(rows), 101)
    assert second.sampled is first.sampled
    assert (first.exact.bounds.max_kv, second.exact.bounds.max_kv) == (100, 101)
    assert preparing.pack(second, padded_shape(second.exact, LIMITS)) is packed
    far = preparing.look_at(rows, 3000)
    shape = padded_shape(far.exact, LIMITS)
    assert shape != padded_shape(first.exact, LIMITS)
    assert numpy.array_equal(preparing.pack(far, shape), pack(rows, 5, shape, IDLE))


def test_other_rows_are_looked_at_anew() -> None:
    preparing = Preparing(LIMITS, IDLE)
    rows = [fed(slot) for slot in range(3)]
    changes = [
        rows,
        [rows[0], fed(1, epoch=4), rows[2]],
        [rows[0], fed(5, id="s1"), rows[2]],
        rows[:2],
        [*rows, fed(3)],
        [rows[0], fed(1, tokens=(7,), start=30), rows[2]],
        [*rows, RowPlan(id="p", slot=6, query=3, start=9, tokens=(1, 2, 3))],
        rows,
    ]
    for changed in changes:
        for turn in range(2):
            ready = preparing.look_at(changed, 50 + turn)
            assert ready.rows == tuple(changed)
            assert ready.host_slots == tuple(row.slot for row in changed)
            assert ready.exact == exact_shape(changed, LIMITS, 50 + turn)
            assert ready.decode_rows == split_rows(changed, 1)
            shape = padded_shape(ready.exact, LIMITS) or ready.exact
            assert numpy.array_equal(preparing.pack(ready, shape), pack(changed, ready.decode_rows, shape, IDLE))


def test_reach_bounds_fed_rows_alone() -> None:
    known = RowPlan(id="k", slot=0, query=1, start=700, tokens=(3,))
    assert exact_shape([known, fed(1)], LIMITS, 300).bounds.max_kv == 701
    assert exact_shape([known, fed(1)], LIMITS, 900).bounds.max_kv == 900
    assert exact_shape([known, fed(1)], LIMITS).bounds.max_kv == 4001
    assert exact_shape([replace(known, samples=False)], LIMITS, 900).bounds.max_kv == 701
