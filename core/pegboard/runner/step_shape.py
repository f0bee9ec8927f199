"""The shape of a step: all that fixes its launches. Steps of one shape run the same kernels on the same addresses, so
that a recorded one can stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from pegboard.contracts.batch import Bounds
from pegboard.contracts.scheduler import RowPlan

#: Bounds of a row's entries in padded shapes grow by this factor. Decode splits rows by them, so that short ones count.
_DECODE_REACH, _PREFILL_REACH, _REACH_GROWTH = 2048, 8192, 4
#: Fewest tokens of prompts, and the step from which on they grow by it: alone, where they are the time to the first
#: token, and beside decode rows, where fewer shapes come again sooner.
_FIRST_TOKENS, _TOKENS_STEP, _MIXED_STEP = 16, 256, 1024
#: Rows from which on their number grows by 16 and by 32 in steps of decode rows alone.
_FEW_ROWS, _MANY_ROWS = 16, 128


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    #: None: no such rows.
    decode: Bounds | None
    prefill: Bounds | None
    #: Whose input and place the host knows: every row's, some rows', or none's, which the device keeps by slot.
    known: Literal["all", "some", "none"]
    #: Tokens that are chosen, idle ones included; those of drafts, too.
    samples: int
    #: Each row has one token and chooses the next: the tokens are the rows.
    chain: bool
    #: Prompt tokens are scored, which takes the hidden state of each.
    scores: bool = False
    #: Most drafts of a row, and rows that choose; 0: no row has drafts, each chooses one token.
    drafts: int = 0
    verified: int = 0

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
    def prompts(self) -> bool:
        """Some of its tokens may be followed by known ones: not each of them leads to a choice."""
        return not self.chain and not (self.drafts and self.samples == self.tokens)

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


def exact_shape(rows: Sequence[RowPlan], limits: Limits, reach: int | None = None) -> StepShape:
    """`reach`: as in the StepPlan."""
    decode_rows = split_rows(rows, limits.decode_width)
    fed = sum(not row.tokens for row in rows)
    drafts = max((row.drafts for row in rows), default=0)
    choosing = sum(row.samples for row in rows)
    samples = choosing + sum(row.drafts for row in rows)
    return StepShape(
        decode=_exact(rows[:decode_rows], reach),
        prefill=_exact(rows[decode_rows:], reach),
        known="all" if not fed else "none" if fed == len(rows) else "some",
        samples=samples,
        chain=samples == len(rows) and all(row.query == 1 for row in rows),
        scores=any(row.targets for row in rows),
        drafts=drafts,
        verified=choosing if drafts else 0,
    )


def _exact(rows: Sequence[RowPlan], reach: int | None) -> Bounds | None:
    if not rows:
        return None
    queries = [row.query for row in rows]
    return Bounds(
        rows=len(rows),
        tokens=sum(queries),
        max_query=max(queries),
        min_query=min(queries),
        max_kv=max(row.start + row.query if row.tokens or reach is None else reach for row in rows),
    )


def padded_shape(exact: StepShape, limits: Limits) -> StepShape | None:
    """The shape that a step takes a recorded one's place with, filled up with idle rows and tokens; None: it is of
    its own kind, because it scores prompts, or has drafts beside prompts. With drafts every row has as many queries as
    the widest."""
    decode, prefill = exact.decode, exact.prefill
    if exact.drafts and prefill is None and decode is not None and exact.samples == decode.tokens:
        wide = _padded_decode(decode, limits, alone=True, width=1 + exact.drafts)
        return replace(exact, decode=wide, known="some", samples=wide.tokens, verified=wide.rows)
    if exact.scores or (decode is not None and decode.max_query > 1):
        return None
    chain = exact.chain and prefill is None
    padded = None if decode is None else _padded_decode(decode, limits, alone=prefill is None)
    samples = 0
    if exact.samples:
        samples = padded.rows if chain and padded is not None else min(_power(exact.samples, 16), limits.rows)
    return StepShape(
        decode=padded,
        prefill=None if prefill is None else _padded_prefill(prefill, limits, alone=decode is None),
        known="none" if exact.known == "none" else "some",
        samples=samples,
        chain=chain,
    )


def _padded_decode(exact: Bounds, limits: Limits, *, alone: bool, width: int = 1) -> Bounds:
    count = exact.rows
    if alone and count > _FEW_ROWS:
        step = 16 if count <= _MANY_ROWS else 32
        padded = -(-count // step) * step
    else:
        padded = _power(count, 2 if alone else 16)
    rows = min(padded, limits.rows)
    reach = _reach(exact.max_kv, _DECODE_REACH, limits.length)
    return Bounds(rows=rows, tokens=rows * width, max_query=width, min_query=width, max_kv=reach)


def _padded_prefill(exact: Bounds, limits: Limits, *, alone: bool) -> Bounds:
    step = _TOKENS_STEP if alone or exact.tokens > _MIXED_STEP else _MIXED_STEP
    if exact.tokens <= step:
        padded = max(_FIRST_TOKENS, _power(exact.tokens, 2))
    else:
        padded = -(-exact.tokens // _TOKENS_STEP) * _TOKENS_STEP
    tokens = min(padded, limits.step_tokens)
    return Bounds(
        rows=min(_power(exact.rows, 4), limits.rows),
        tokens=tokens,
        max_query=tokens,
        min_query=0,
        max_kv=_reach(exact.max_kv, _PREFILL_REACH, limits.length),
    )


def _power(count: int, factor: int) -> int:
    """1, or `factor` times itself until it is enough; from 16 on doubled."""
    padded = 1
    while padded < count:
        padded *= factor if padded < 16 else 2
    return padded


def _reach(entries: int, first: int, most: int) -> int:
    reach = first
    while reach < entries:
        reach *= _REACH_GROWTH
    return min(reach, most)
