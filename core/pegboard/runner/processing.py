"""Logits processors in a step: which rows want which, and whose fault it is when one raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.processor import LogitsProcessor, ProcessorOpening, ProcessRows
from pegboard.contracts.sampler import LogprobTensors, Sampler, SlotOpening
from pegboard.contracts.scheduler import RowPlan
from pegboard.errors import PegboardError, PluginError
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
        #: Whose rows it had last, and in which life.
        self.owner: tuple[str, int] | None = None
        #: Why it can't go on.
        self.failure: str | None = None


class Asked(msgspec.Struct, frozen=True):
    """A row that asks for processors, where its logits begin, and the drafts that more of them follow."""

    row: RowPlan
    place: int
    drafts: tuple[int, ...]

    @property
    def places(self) -> range:
        return range(self.place, self.place + 1 + len(self.drafts))


class RawLogits(msgspec.Struct, frozen=True):
    """Logits [M, V] as the model gave them, which of the step's rows they are of [M], and after how many of its drafts
    [M]."""

    rows: Tensor
    drafts: Tensor
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

    @property
    def slots(self) -> Collection[int]:
        """Whose requests ask for a processor."""
        return self._slots

    def wanted(self, rows: Sequence[RowPlan]) -> bool:
        """By one of the rows."""
        return bool(self._slots) and any(row.slot in self._slots for row in rows)

    def apply(
        self,
        logits: Tensor | None,
        rows: Sequence[RowPlan],
        queries: Sequence[int],
        drafts: Mapping[str, tuple[int, ...]],
    ) -> Processed:
        """Change logits [S, V] of the rows that choose, `rows`, in place: the first of each row's `queries` logits, and
        those after each of its `drafts`. There may be more logits, of idle rows."""
        if logits is None:
            raise PegboardError("rows that choose have logits")
        places = [end - count for end, count in zip(accumulate(queries), queries, strict=True)]
        mine = [
            Asked(row, place, drafts.get(row.id, ()))
            for place, row in zip(places, rows, strict=True)
            if row.slot in self._slots
        ]
        raw = [one for one in mine if self._slots[one.row.slot].scores_raw]
        kept = self._keep(logits, rows, raw) if raw else None
        for one in mine:
            self._accept(self._slots[one.row.slot], one.row)
        for name, processor in self._processors.items():
            wanting = [one for one in mine if self._wants(one.row, name)]
            if wanting:
                self._process(name, processor, logits, wanting)
        failures = {one.row.id: self._slots[one.row.slot].failure for one in mine}
        return Processed({id: failure for id, failure in failures.items() if failure is not None}, kept)

    def _keep(self, logits: Tensor, rows: Sequence[RowPlan], raw: Sequence[Asked]) -> RawLogits:
        order = {row.id: index for index, row in enumerate(rows)}
        facts = [(order[one.row.id], after, place) for one in raw for after, place in enumerate(one.places)]
        index, after, places = (self._upload(list(part), torch.int64) for part in zip(*facts, strict=True))
        return RawLogits(index, after, logits.index_select(0, places))

    def follow(self, row: RowPlan, tokens: Sequence[int]) -> None:
        """What a row has chosen, for good: known before the sequence's next row, if processors need it."""
        slot = self._slots.get(row.slot)
        if slot is not None and slot.owner == (row.id, row.epoch) and min(tokens, default=-1) >= 0:
            self._tell(slot, row.slot, tokens)

    def _wants(self, row: RowPlan, name: str) -> bool:
        slot = self._slots[row.slot]
        return name in slot.names and slot.failure is None

    def _accept(self, slot: _Slot, row: RowPlan) -> None:
        """Tell the tokens that the row brings and the slot's processors don't know of yet."""
        slot.owner = row.id, row.epoch
        if not row.tokens or not self._followers(slot):
            return
        new = row.start + len(row.tokens) - slot.known
        if new > len(row.tokens):
            slot.failure = f"{new} tokens are new to its logits processors, and the step tells {len(row.tokens)}"
        elif new > 0:
            self._tell(slot, row.slot, row.tokens[-new:])

    def _followers(self, slot: _Slot) -> list[str]:
        """Its processors that follow the text."""
        return [name for name in slot.names if name in self._processors and self._processors[name].needs_host_token]

    def _tell(self, slot: _Slot, place: int, tokens: Sequence[int]) -> None:
        slot.known += len(tokens)
        for name in self._followers(slot):
            if slot.failure is None:
                try:
                    self._processors[name].accept(place, tuple(tokens))
                except Exception as error:
                    slot.failure = _failure(name, error)

    def _process(self, name: str, processor: LogitsProcessor, logits: Tensor, asked: Sequence[Asked]) -> None:
        """All at once; row by row when that raises. On a copy, so that there is something to begin again with."""
        try:
            self._run(processor, logits, asked)
            return
        except Exception as error:
            if len(asked) == 1:
                self._slots[asked[0].row.slot].failure = _failure(name, error)
                return
        for one in asked:
            try:
                self._run(processor, logits, [one])
            except Exception as error:
                self._slots[one.row.slot].failure = _failure(name, error)

    def _run(self, processor: LogitsProcessor, logits: Tensor, asked: Sequence[Asked]) -> None:
        places = self._upload([place for one in asked for place in one.places], torch.int64)
        own = logits.index_select(0, places)
        drafts = tuple(one.drafts for one in asked) if any(one.drafts for one in asked) else ()
        given: object = processor.process(own, ProcessRows(slots=tuple(one.row.slot for one in asked), drafts=drafts))
        if given is not None:
            raise PluginError("process gave a result, must change its logits in place and give None")
        logits.index_copy_(0, places, own)


def rescore(processed: Processed, chosen: Chosen, sampler: Sampler) -> LogprobTensors | None:
    """Log-probabilities with those of rows that want the model's own scored again, from before the processors."""
    raw, found, ids = processed.raw, chosen.logprobs, chosen.ids
    if found is None or raw is None or ids is None:
        return found
    # With drafts in the step each row has several tokens; what stands beyond the kept ones is read by nobody
    index = (raw.rows,) if ids.dim() == 1 else (raw.rows, raw.drafts)
    scored = sampler.score(raw.logits, ids[index].clamp(min=0), found.top_ids.shape[-1])
    return LogprobTensors(
        chosen=found.chosen.index_put(index, scored.chosen.to(found.chosen.dtype)),
        top_ids=found.top_ids.index_put(index, scored.top_ids),
        top_values=found.top_values.index_put(index, scored.top_values.to(found.top_values.dtype)),
    )


def _failure(name: str, error: Exception) -> str:
    logger.error("logits processor %s failed; its request ends with an error", name, exc_info=error)
    said = str(error) if isinstance(error, PegboardError) else f"{type(error).__name__}: {error}"
    return f"logits processor {name} failed: {said}"
