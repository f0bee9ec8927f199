"""Logits processors in a step: which rows want which, and whose fault it is when one raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.processor import LogitsProcessor, ProcessorOpening, ProcessRows
from pegboard.contracts.sampler import LogprobTensors, Sampler, SlotOpening
from pegboard.contracts.scheduler import RowPlan
from pegboard.errors import PegboardError
from pegboard.processing import read_arguments

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


class Processed(msgspec.Struct, frozen=True):
    """Of one step: sequence id -> why it fails; the places of rows whose raw log-probabilities are wanted, and their
    logits as the model gave them."""

    failed: Mapping[str, str]
    raw_places: Tensor | None
    raw_logits: Tensor | None


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

    def apply(self, logits: Tensor, rows: Sequence[RowPlan]) -> Processed:
        """Change logits [S, V] of the rows that choose, `rows`, in place; there may be more logits, of idle rows."""
        slots = {place: self._slots[row.slot] for place, row in enumerate(rows) if row.slot in self._slots}
        raw = [place for place, slot in slots.items() if slot.scores_raw]
        places = self._upload(raw, torch.int64) if raw else None
        kept = None if places is None else logits.index_select(0, places)
        for place, slot in slots.items():
            self._accept(slot, rows[place])
        for name, processor in self._processors.items():
            mine = [place for place, slot in slots.items() if name in slot.names and slot.failure is None]
            if mine:
                self._process(name, processor, logits, mine, rows, slots)
        failed = {rows[place].id: slot.failure for place, slot in slots.items() if slot.failure is not None}
        return Processed(failed, places, kept)

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

    def _process(
        self,
        name: str,
        processor: LogitsProcessor,
        logits: Tensor,
        mine: Sequence[int],
        rows: Sequence[RowPlan],
        slots: Mapping[int, _Slot],
    ) -> None:
        """All rows at once; row by row when that raises. On a copy, so that there is something to begin again with."""
        try:
            self._run(processor, logits, mine, rows)
            return
        except Exception as error:
            if len(mine) == 1:
                slots[mine[0]].failure = _failure(name, error)
                return
        for place in mine:
            try:
                self._run(processor, logits, [place], rows)
            except Exception as error:
                slots[place].failure = _failure(name, error)

    def _run(self, processor: LogitsProcessor, logits: Tensor, mine: Sequence[int], rows: Sequence[RowPlan]) -> None:
        places = self._upload(mine, torch.int64)
        own = logits.index_select(0, places)
        processor.process(own, ProcessRows(slots=tuple(rows[place].slot for place in mine)))
        logits.index_copy_(0, places, own)


def rescore(processed: Processed, found: LogprobTensors | None, ids: Tensor, sampler: Sampler) -> LogprobTensors | None:
    """Log-probabilities with those of rows that want the model's own scored again, from before the processors."""
    places, logits = processed.raw_places, processed.raw_logits
    if found is None or places is None or logits is None:
        return found
    scored = sampler.score(logits, ids[places], found.top_ids.shape[1])
    return LogprobTensors(
        chosen=found.chosen.index_copy(0, places, scored.chosen.to(found.chosen.dtype)),
        top_ids=found.top_ids.index_copy(0, places, scored.top_ids),
        top_values=found.top_values.index_copy(0, places, scored.top_values.to(found.top_values.dtype)),
    )


def _failure(name: str, error: Exception) -> str:
    logger.error("logits processor %s failed; its request ends with an error", name, exc_info=error)
    said = str(error) if isinstance(error, PegboardError) else f"{type(error).__name__}: {error}"
    return f"logits processor {name} failed: {said}"
