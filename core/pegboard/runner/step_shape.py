"""The shape of a step: all that fixes its launches. Steps of one shape run the same kernels on the same addresses, so
that a recorded one can stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pegboard.contracts.batch import Bounds
from pegboard.contracts.scheduler import RowPlan

#: Bounds of a row's entries in padded shapes grow by this factor: a backend splits rows by them.
_FIRST_REACH, _REACH_GROWTH = 2048, 4
_FIRST_TOKENS, _TOKENS_STEP = 16, 256


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    #: None: no such rows.
    decode: Bounds | None
    prefill: Bounds | None
    #: Whose input and place the host knows: every row's, some rows', or none's, which the device keeps by slot.
    known: Literal["all", "some", "none"]
    #: Tokens that are chosen, idle ones included.
    samples: int
    #: Each row has one token and chooses the next: the tokens are the rows.
    chain: bool
    #: Prompt tokens are scored, which takes the hidden state of each.
    scores: bool = False

    @property
    def rows(self) -> int:
        return sum(part.rows for part in (self.decode, self.prefill) if part is not None)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in (self.decode, self.prefill) if part is not None)

    @property
    def decode_tokens(self) -> int:
        return 0 if self.decode is None else self.decode.tokens

    @property
    def bounds(self) -> Bounds:
        parts = [part for part in (self.decode, self.prefill) if part is not None]
        return Bounds(
            rows=self.rows,
            tokens=self.tokens,
            max_query=max(part.max_query for part in parts),
            min_query=min(part.min_query for part in parts),
            max_kv=max(part.max_kv for part in parts),
        )


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engine: no padded shape exceeds them."""

    rows: int
    step_tokens: int
    #: Entries of a row
    length: int
    #: Queries of a decode row
    decode_width: int


def split_rows(rows: Sequence[RowPlan], decode_width: int) -> int:
    """How many rows are decode rows; they come first."""
    count = 0
    while count < len(rows) and rows[count].query <= decode_width:
        count += 1
    return count


def exact_shape(rows: Sequence[RowPlan], limits: Limits) -> StepShape:
    decode_rows = split_rows(rows, limits.decode_width)
    fed = sum(not row.tokens for row in rows)
    samples = sum(row.samples for row in rows)
    return StepShape(
        decode=_exact(rows[:decode_rows]),
        prefill=_exact(rows[decode_rows:]),
        known="all" if not fed else "none" if fed == len(rows) else "some",
        samples=samples,
        chain=samples == len(rows) and all(row.query == 1 for row in rows),
        scores=any(row.targets for row in rows),
    )


def _exact(rows: Sequence[RowPlan]) -> Bounds | None:
    if not rows:
        return None
    queries = [row.query for row in rows]
    return Bounds(
        rows=len(rows),
        tokens=sum(queries),
        max_query=max(queries),
        min_query=min(queries),
        max_kv=max(row.start + row.query for row in rows),
    )


def padded_shape(exact: StepShape, limits: Limits) -> StepShape | None:
    """The shape that a step takes a recorded one's place with, filled up with idle rows and tokens; None: it is of
    its own kind, because it scores prompts, or has drafts."""
    decode, prefill = exact.decode, exact.prefill
    if exact.scores or (decode is not None and decode.max_query > 1):
        return None
    chain = exact.chain and prefill is None
    padded = None if decode is None else _padded_decode(decode, limits)
    samples = 0
    if exact.samples:
        samples = padded.rows if chain and padded is not None else _rows(exact.samples, limits.rows)
    return StepShape(
        decode=padded,
        prefill=None if prefill is None else _padded_prefill(prefill, limits),
        known="none" if exact.known == "none" else "some",
        samples=samples,
        chain=chain,
    )


def _padded_decode(exact: Bounds, limits: Limits) -> Bounds:
    rows = _rows(exact.rows, limits.rows)
    return Bounds(rows=rows, tokens=rows, max_query=1, min_query=1, max_kv=_reach(exact.max_kv, limits.length))


def _padded_prefill(exact: Bounds, limits: Limits) -> Bounds:
    tokens = _tokens(exact.tokens, limits.step_tokens)
    return Bounds(
        rows=_rows(exact.rows, limits.rows),
        tokens=tokens,
        max_query=tokens,
        min_query=0,
        max_kv=_reach(exact.max_kv, limits.length),
    )


def _rows(count: int, most: int) -> int:
    """1, 2, 4, 8, 16, then multiples of 16 to 128, then of 32."""
    if count <= 16:
        padded = 1 << (count - 1).bit_length()
    else:
        step = 16 if count <= 128 else 32
        padded = -(-count // step) * step
    return min(padded, most)


def _tokens(count: int, most: int) -> int:
    """Powers of two from 16 to 256, then multiples of 256."""
    if count <= _TOKENS_STEP:
        padded = max(_FIRST_TOKENS, 1 << (count - 1).bit_length())
    else:
        padded = -(-count // _TOKENS_STEP) * _TOKENS_STEP
    return min(padded, most)


def _reach(entries: int, most: int) -> int:
    reach = _FIRST_REACH
    while reach < entries:
        reach *= _REACH_GROWTH
    return min(reach, most)
