"""Logits processors in a step: which rows want which, and whose fault it is when one raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.processor import LogitsProcessor, ProcessorOpening, ProcessRows
from pegboard.contracts.sampler import LogprobTensors, Sampler, SlotOpening
from pegboard.contracts.scheduler import RowPlan
from pegboard.errors import PegboardError
from pegboard.processing import read_arguments

from .stepping import Chosen

logger = logging.getLogger("pegboard")


class _Slot:
    """What the request in a slot asks for."""

    def __init__(self, opening: SlotOpening) -> None:
        self.names = tuple(opening.sampling.processors)
        #: Tokens of its text that processors know of.
        self.known = len(opening.prompt) + len(opening.output)
        self.scores_raw = opening.sampling.logprobs is not None and opening.sampling.logprobs_mode == "raw"
        #: Why it can't go on.
        self.failure: str | None = None


class RawLogits(msgspec.Struct, frozen=True):
    """Logits [M, V] as the model gave them, and which of the step's rows they are of [M]."""

    rows: Tensor
    logits: Tensor


class Processed(msgspec.Struct, frozen=True):
    """Of one step: sequence id -> why it fails; `raw`: of rows whose raw log-probabilities are wanted."""

    failed: Mapping[str, str]
    raw: RawLogits | None


class Processing:
    """`upload` brings a list of numbers to the device without waiting for it."""

    def __init__(
        self, processors: Mapping[str, LogitsProcessor], upload: Callable[[Sequence[int], torch.dtype], Tensor]
    ) -> None:
        self._processors, self._upload = processors, upload
        #: Slots whose requests ask for a processor, and no others.
        self._slots: dict[int, _Slot] = {}

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self._slots.pop(opening.slot, None)
            if opening.sampling.processors:
                self._slots[opening.slot] = self._opened(opening)

    def _opened(self, opening: SlotOpening) -> _Slot:
        slot = _Slot(opening)
        for name, values in opening.sampling.processors.items():
            try:
                processor = self._processors[name]
                processor.open(
                    ProcessorOpening(
                        slot=opening.slot,
                        arguments=read_arguments(processor, name, values),
                        prompt=opening.prompt,
                        output=opening.output,
                        stop_ids=opening.stop_ids,
                    )
                )
            except Exception as error:
                slot.failure = _failure(name, error)
        return slot

    def wanted(self, rows: Sequence[RowPlan]) -> bool:
        """By one of the rows."""
        return bool(self._slots) and any(row.slot in self._slots for row in rows)

    def apply(self, logits: Tensor | None, rows: Sequence[RowPlan], queries: Sequence[int]) -> Processed:
        """Change logits [S, V] of the rows that choose, `rows`, in place, the first of each row's `queries` logits: who
        asks for a processor has no drafts. There may be more logits, of idle rows."""
        if logits is None:
            raise PegboardError("rows that choose have logits")
        places = [end - count for end, count in zip(accumulate(queries), queries, strict=True)]
        mine = {place: row for place, row in zip(places, rows, strict=True) if row.slot in self._slots}
        raw = [place for place, row in mine.items() if self._slots[row.slot].scores_raw]
        kept = None
        if raw:
            order = {row.id: index for index, row in enumerate(rows)}
            at = self._upload([order[mine[place].id] for place in raw], torch.int64)
            kept = RawLogits(at, logits.index_select(0, self._upload(raw, torch.int64)))
        for row in mine.values():
            self._accept(self._slots[row.slot], row)
        for name, processor in self._processors.items():
            wanting = {place: row for place, row in mine.items() if self._wants(row, name)}
            if wanting:
                self._process(name, processor, logits, wanting)
        failures = {row.id: self._slots[row.slot].failure for row in mine.values()}
        return Processed({id: failure for id, failure in failures.items() if failure is not None}, kept)

    def _wants(self, row: RowPlan, name: str) -> bool:
        slot = self._slots[row.slot]
        return name in slot.names and slot.failure is None

    def _accept(self, slot: _Slot, row: RowPlan) -> None:
        """Tell the tokens that the row brings and the slot's processors don't know of yet."""
        names = [name for name in slot.names if name in self._processors and self._processors[name].needs_host_token]
        if not names or slot.failure is not None:
            return
        end = row.start + len(row.tokens)
        new, slot.known = end - slot.known, max(end, slot.known)
        if new > len(row.tokens):
            slot.failure = f"{new} tokens are new to its logits processors, and the step tells {len(row.tokens)}"
        elif new > 0:
            for name in names:
                try:
                    self._processors[name].accept(row.slot, row.tokens[-new:])
                except Exception as error:
                    slot.failure = _failure(name, error)

    def _process(self, name: str, processor: LogitsProcessor, logits: Tensor, rows: Mapping[int, RowPlan]) -> None:
        """`rows` by the place of their logits. All at once; row by row when that raises. On a copy, so that there is
        something to begin again with."""
        try:
            self._run(processor, logits, rows)
            return
        except Exception as error:
            if len(rows) == 1:
                [row] = rows.values()
                self._slots[row.slot].failure = _failure(name, error)
                return
        for place, row in rows.items():
            try:
                self._run(processor, logits, {place: row})
            except Exception as error:
                self._slots[row.slot].failure = _failure(name, error)

    def _run(self, processor: LogitsProcessor, logits: Tensor, rows: Mapping[int, RowPlan]) -> None:
        places = self._upload(list(rows), torch.int64)
        own = logits.index_select(0, places)
        processor.process(own, ProcessRows(slots=tuple(row.slot for row in rows.values())))
        logits.index_copy_(0, places, own)


def rescore(processed: Processed, chosen: Chosen, sampler: Sampler) -> LogprobTensors | None:
    """Log-probabilities with those of rows that want the model's own scored again, from before the processors."""
    raw, found, ids = processed.raw, chosen.logprobs, chosen.ids
    if found is None or raw is None or ids is None:
        return found
    # With drafts beside them each row has several tokens, and these rows their first alone
    first = raw.rows if ids.dim() == 1 else (raw.rows, torch.zeros_like(raw.rows))
    scored = sampler.score(raw.logits, ids[first], found.top_ids.shape[-1])
    return LogprobTensors(
        chosen=found.chosen.index_put(_index(first), scored.chosen.to(found.chosen.dtype)),
        top_ids=found.top_ids.index_put(_index(first), scored.top_ids),
        top_values=found.top_values.index_put(_index(first), scored.top_values.to(found.top_values.dtype)),
    )


def _index(first: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return first if isinstance(first, tuple) else (first,)


def _failure(name: str, error: Exception) -> str:
    logger.error("logits processor %s failed; its request ends with an error", name, exc_info=error)
    said = str(error) if isinstance(error, PegboardError) else f"{type(error).__name__}: {error}"
    return f"logits processor {name} failed: {said}"
