"""ModelRunner: one StepPlan -> device work -> a Ticket. Owns the device's buffers; names no plugin."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy
import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionBackend, LayerCache
from pegboard.contracts.cache import CacheGroup, EntryMove, PageCopy
from pegboard.contracts.model import DecoderModel, ModelSpec, StepContext
from pegboard.contracts.ops import Ops
from pegboard.contracts.sampler import LogprobTensors, Sampler, SampleRows
from pegboard.contracts.scheduler import RowPlan, StepPlan
from pegboard.dtypes import torch_dtype

from .attending import Attending, Phase
from .batching import Assembled, assemble
from .device_state import DeviceState
from .tickets import Ticket

#: Rows of [rows, V] logits that prompt scoring holds at a time.
_SCORE_ROWS = 256


class RunnerParts:
    """The parts that a runner calls, already created for one device."""

    def __init__(
        self,
        *,
        model: DecoderModel,
        spec: ModelSpec,
        ops: Ops,
        prefill: AttentionBackend[Any],
        decode: AttentionBackend[Any],
        sampler: Sampler,
    ) -> None:
        self.model, self.spec, self.ops = model, spec, ops
        self.prefill, self.decode, self.sampler = prefill, decode, sampler

    def replace(self, **parts: Any) -> RunnerParts:
        """The same with other parts."""
        return RunnerParts(**(vars(self) | parts))


def allocate_caches(
    groups: Sequence[CacheGroup], pages: Sequence[int], layers: int, page_size: int, device: str
) -> tuple[LayerCache, ...]:
    """Zero-filled tensors for every layer, in layer order."""
    caches: dict[int, LayerCache] = {}
    for group, count in zip(groups, pages, strict=True):
        for layer in group.layers:
            tensors: Mapping[str, Tensor] = {
                spec.name: _zeros((count, *spec.shape), torch_dtype(spec.dtype), device)
                for spec in group.layout.tensors
            }
            caches[layer] = LayerCache(layout=group.layout, group=group.index, page_size=page_size, tensors=tensors)
    return tuple(caches[layer] for layer in range(layers))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On CPU from calloc: pages that no sequence has used yet cost no memory, and no time to clear."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(numpy.zeros(count, dtype=numpy.uint8)).view(dtype).view(shape)


class ModelRunner:
    """`vocab_limit`: ids from here on are padding of the head and are never chosen."""

    def __init__(
        self,
        parts: RunnerParts,
        *,
        groups: Sequence[CacheGroup],
        pages: Sequence[int],
        slots: int,
        max_length: int,
        page_size: int,
        device: str,
        vocab_limit: int,
        decode_width: int,
    ) -> None:
        self._parts = parts
        self._vocab_limit = vocab_limit
        self._decode_width = decode_width
        self._state = DeviceState(groups, slots, max_length, page_size, decode_width, device)
        self.device = device
        #: One a layer.
        self.caches = allocate_caches(groups, pages, len(parts.spec.layers), page_size, device)
        self._attending = Attending(
            Phase(parts.prefill, device), Phase(parts.decode, device), parts.spec.layers, self.caches
        )

    def with_parts(self, parts: RunnerParts) -> ModelRunner:
        """Another runner on the same state and caches, for steps that other parts run."""
        other = copy.copy(self)
        other._parts = parts
        other._attending = Attending(
            Phase(parts.prefill, self.device), Phase(parts.decode, self.device), parts.spec.layers, self.caches
        )
        return other

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Copies, tables, openings, then the rows. On CPU the work is done when this returns."""
        parts, state = self._parts, self._state
        self._move_cache(plan)
        begin = perf_counter()
        state.apply(plan.tables)
        openings = [row.opening for row in plan.rows if row.opening is not None]
        if openings:
            parts.sampler.open(openings)
        step = assemble(plan.rows, state, self._decode_width)
        self._attending.begin(step.batch)
        prepared = perf_counter() - begin
        sampled, scored = [row for row in plan.rows if row.samples], self._scored(plan.rows)
        chosen, last = self._sampling(plan.rows), step.query_start[1:] - 1
        if chosen is not None:
            last = last[chosen]
        context = StepContext(
            batch=step.batch,
            ops=parts.ops,
            caches=self.caches,
            attend=self._attending,
            outputs=None if scored or last.shape[0] == step.batch.bounds.tokens else last,
        )
        hidden = parts.model.forward(context).hidden
        scores = [(row, self._score(hidden, row, at)) for row, at in scored]
        # A model may have left out what nobody wants
        hidden = hidden if hidden.shape[0] == last.shape[0] else hidden[last]
        ids, logprobs = self._sample(plan.rows, hidden, step, chosen)
        return Ticket(plan, sampled, ids, logprobs, scores, prepared)

    def _sampling(self, rows: Sequence[RowPlan]) -> Tensor | None:
        """[N]: places of the rows that sample; None: all do."""
        chosen = [index for index, row in enumerate(rows) if row.samples]
        return None if len(chosen) == len(rows) else self._state.upload(chosen, torch.int64)

    def _sample(
        self, rows: Sequence[RowPlan], hidden: Tensor, step: Assembled, chosen: Tensor | None
    ) -> tuple[Tensor | None, LogprobTensors | None]:
        """hidden [N, E] of the last tokens of the rows that sample, and the places of those rows (`_sampling`)."""
        state = self._state
        ends = step.starts + step.query_start.diff()
        state.lengths.index_copy_(0, step.slots, ends)
        host_slots = tuple(row.slot for row in rows if row.samples)
        if not host_slots:
            return None, None
        slots, positions = step.slots, ends
        if chosen is not None:
            slots, positions = slots[chosen], positions[chosen]
        logits = self._logits(hidden)
        output = self._parts.sampler.sample(logits, SampleRows(slots=slots, positions=positions, host_slots=host_slots))
        # A failed row (-1) must not feed itself an id that is none.
        state.last_ids.index_copy_(0, slots, output.ids.clamp(min=0))
        return output.ids, output.logprobs

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._parts.model.logits(hidden, self._parts.ops)
        if self._vocab_limit < logits.shape[1]:
            logits[:, self._vocab_limit :] = float("-inf")
        return logits

    @staticmethod
    def _scored(rows: Sequence[RowPlan]) -> list[tuple[RowPlan, int]]:
        """Rows whose prompt tokens are scored, with their first token's place in the batch."""
        found, at = [], 0
        for row in rows:
            if row.targets:
                found.append((row, at))
            at += row.query
        return found

    def _score(self, hidden: Tensor, row: RowPlan, at: int) -> LogprobTensors:
        targets = self._state.upload([max(t, 0) for t in row.targets], torch.int64)
        pieces = []
        for first in range(0, row.query, _SCORE_ROWS):
            part = slice(first, min(first + _SCORE_ROWS, row.query))
            logits = self._logits(hidden[at + part.start : at + part.stop])
            pieces.append(self._parts.sampler.score(logits, targets[part], row.top_targets))
        return LogprobTensors(
            chosen=torch.cat([p.chosen for p in pieces]),
            top_ids=torch.cat([p.top_ids for p in pieces]),
            top_values=torch.cat([p.top_values for p in pieces]),
        )

    def _move_cache(self, plan: StepPlan) -> None:
        ops = self._parts.ops
        for copies in _independent(plan.copies):
            self._each_layer(copies, ops.copy_pages)
        for group in sorted({move.group for move in plan.moves}):
            self._each_layer([move for move in plan.moves if move.group == group], ops.move_entries)

    def _each_layer(
        self, pairs: Sequence[PageCopy | EntryMove], run: Callable[[LayerCache, Tensor, Tensor], None]
    ) -> None:
        """`pairs` are of one group."""
        source = self._state.upload([pair.source for pair in pairs], torch.int64)
        target = self._state.upload([pair.target for pair in pairs], torch.int64)
        for cache in self.caches:
            if cache.group == pairs[0].group:
                run(cache, source, target)

    @property
    def parts(self) -> RunnerParts:
        return self._parts

    @property
    def cache_bytes(self) -> int:
        return sum(t.nbytes for cache in self.caches for t in cache.tensors.values())

    @property
    def workspace_bytes(self) -> int:
        state = self._state
        tensors = [*state.tables, *state.dropped, state.lengths, state.last_ids]
        return sum(t.nbytes for t in tensors) + self._attending.workspace_bytes


def _independent(copies: Sequence[PageCopy]) -> Iterator[list[PageCopy]]:
    """Runs of copies of one group, in order, in which no page is both read and written or written twice."""
    run: list[PageCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for pair in copies:
        clash = pair.source in written or pair.target in read or pair.target in written
        if run and (clash or pair.group != run[0].group):
            yield run
            run, read, written = [], set(), set()
        run.append(pair)
        read.add(pair.source)
        written.add(pair.target)
    if run:
        yield run
