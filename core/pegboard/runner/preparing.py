"""What the host works out of a step's rows before it launches them. Steps of the same rows cost that once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy
from msgspec.structs import replace
from numpy.typing import NDArray

from pegboard.contracts.scheduler import RowPlan

from .batching import pack
from .step_shape import Limits, StepShape, exact_shape, split_rows


class PreparedRows(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[RowPlan, ...]
    #: Decode rows, which come first.
    decode_rows: int
    #: The rows that choose a token, and their slots.
    sampled: tuple[RowPlan, ...]
    host_slots: tuple[int, ...]
    exact: StepShape


class Preparing:
    """Remembers the last step: as long as the device feeds its rows, and none comes or goes, only their reach grows."""

    def __init__(self, limits: Limits, idle: int) -> None:
        self._limits, self._idle = limits, idle
        self._last: PreparedRows | None = None
        #: What was packed last, and of which rows in which shape.
        self._packed: tuple[tuple[RowPlan, ...], StepShape, NDArray[numpy.int64]] | None = None

    def look_at(self, rows: Sequence[RowPlan], reach: int | None) -> PreparedRows:
        """`reach`: see StepPlan."""
        rows, last = tuple(rows), self._last
        if last is not None and reach is not None and last.exact.known == "none" and last.rows == rows:
            return replace(last, exact=_reaching(last.exact, reach))
        sampled = tuple(row for row in rows if row.samples)
        self._last = PreparedRows(
            rows=rows,
            decode_rows=split_rows(rows, self._limits.decode_width),
            sampled=sampled,
            host_slots=tuple(row.slot for row in sampled),
            exact=exact_shape(rows, self._limits, reach),
        )
        return self._last

    def pack(self, prepared: PreparedRows, shape: StepShape) -> NDArray[numpy.int64]:
        """See `batching.pack`. The same array as before means the same numbers."""
        rows = prepared.rows
        if self._packed is None or self._packed[0] is not rows or self._packed[1] != shape:
            self._packed = rows, shape, pack(rows, prepared.decode_rows, shape, self._idle)
        return self._packed[2]


def _reaching(shape: StepShape, reach: int) -> StepShape:
    if shape.decode is None or shape.decode.max_kv == reach:
        return shape
    return replace(shape, decode=replace(shape.decode, max_kv=reach))
