"""ModelRunner: one StepPlan -> device work -> a Ticket. Owns the device's buffers; names no plugin."""

from __future__ import annotations

import copy
import math
import mmap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from time import perf_counter

import torch
from msgspec.structs import replace
from torch import Tensor

from pegboard.contracts.attention import LayerCache
from pegboard.contracts.cache import CacheGroup, EntryMove, PageCopy
from pegboard.contracts.sampler import LogprobTensors
from pegboard.contracts.scheduler import RowPlan, StepPlan
from pegboard.dtypes import torch_dtype
from pegboard.errors import ConfigError

from .adapting import DraftLimits
from .attending import Attending, Phase
from .batching import first_tokens, most_packed, pack
from .compiling.ahead import Compilation
from .device_state import DeviceState
from .preparing import PreparedRows, Preparing
from .processing import Processing, rescore
from .recording import Recordings, ResultT
from .rehearsal import Rehearsal, choice_key, shapes_ahead, verification_key
from .step_shape import Limits, StepShape, padded_shape
from .stepping import Chosen, Computed, RunnerParts, Stepping
from .tickets import Ticket
from .uploading import Uploads

#: Rows of [rows, V] logits that prompt scoring holds at a time.
_SCORE_ROWS = 256


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
    """On CPU mapped: pages that no sequence has used yet cost no memory, and no time to clear.

    A mapping that could be shared (nobody shares it) is given by the system in a third of the time that private memory
    takes: 2.8 against 8 us for 4 KiB on a virtual machine, 34 ms of a prompt of 512 tokens. Huge pages took longer."""
    count = math.prod(shape) * dtype.itemsize
    if device != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8).view(dtype).view(shape)


class ModelRunner:
    """`vocab_limit`: ids from here on are padding of the head and are never chosen.

    `padded`: steps of parts that are all capturable are filled up to shapes that come again. `recorded`: such steps are
    replayed as CUDA graphs; else they launch the same kernels one by one. `adapts`: rows get as many drafts as pay."""

    def __init__(
        self,
        parts: RunnerParts,
        *,
        groups: Sequence[CacheGroup],
        pages: Sequence[int],
        limits: Limits,
        page_size: int,
        device: str,
        vocab_limit: int,
        padded: bool = False,
        recorded: bool = False,
        adapts: bool = False,
    ) -> None:
        self._limits, self._vocab_limit = limits, vocab_limit
        trees = parts.tree_depth is not None
        self._state = DeviceState(groups, limits.rows, limits.length, page_size, limits.decode_width, device, trees)
        self._uploads = Uploads(self._state.device, most_packed(limits))
        self._preparing = Preparing(limits, self._state.idle)
        self.device = device
        #: One a layer.
        self.caches = allocate_caches(groups, pages, len(parts.spec.layers), page_size, device)
        self._padded = padded
        self._recordings = Recordings() if recorded else None
        #: While kernels compile, and what may be recorded once they are there.
        self._compilation: Compilation | None = None
        self._ahead: set[Hashable] = set()
        most, self._drafts = limits.decode_width - 1, None
        if parts.speculator is not None:
            self._drafts = DraftLimits(most, adapts, parts.tree_depth)
        self._processing = Processing(parts.processors, self._state.upload)
        self._use(parts)

    def _use(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._attending = Attending(
            Phase(parts.prefill, self.device), Phase(parts.decode, self.device), parts.spec.layers, self.caches
        )
        self._stepping = Stepping(parts, self._state, self._attending, self.caches, self._vocab_limit, self._drafts)

    def with_parts(self, parts: RunnerParts) -> ModelRunner:
        """Another runner on the same state and caches, for steps that other parts run, kernel by kernel."""
        other = copy.copy(self)
        other._recordings, other._compilation, other._padded = None, None, False
        other._use(parts)
        return other

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Compiles, in the background, what most steps launch; a recorded one then needs no plain one before it.
        ConfigError: the largest step needs more memory than there is."""
        if self._recordings is None or not self._capturable(decode=True, prefill=True):
            return
        compilation = self._compilation = Compilation(self.device)
        first, rest = shapes_ahead(self._limits)
        rehearsal = Rehearsal(self._stepping, self._parts.sampler, self._limits)

        def vector(shape: StepShape) -> Tensor:
            return self._uploads.send(pack([], 0, shape, self._state.idle))

        try:
            compilation.rehearse(lambda: rehearsal.run(first, vector, every_choice=False))
            compilation.rehearse(lambda: rehearsal.run(rest, vector))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {self._limits.step_tokens} tokens does not fit beside weights and cache: {error}",
                ["lower kv_memory, max_step_tokens or max_rows"],
            ) from error
        self._ahead = rehearsal.done

    def _settle_rehearsal(self) -> None:
        if self._compilation is not None and self._recordings is not None and self._compilation.over():
            self._recordings.rehearsed |= self._ahead
            self._compilation = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Copies, tables, openings, then the rows. On CPU the work is done when this returns."""
        self._move_cache(plan)
        begin = perf_counter()
        self._state.apply(plan.tables)
        openings = [row.opening for row in plan.rows if row.opening is not None]
        drafting = self._stepping.drafting
        if openings:
            self._parts.sampler.open(openings)
            if drafting is not None:
                drafting.open(openings)
            self._processing.open(openings)
        rows = plan.rows if drafting is None else drafting.settle(plan.rows, self._processing.slots)
        measured = None if self._drafts is None else self._drafts.begin(rows, begin)
        ready = self._preparing.look_at(rows, plan.reach)
        shape, padded = self._shape(ready.exact)
        vector = self._uploads.send(self._preparing.pack(ready, shape))
        spent = perf_counter() - begin - self._stepping.prepared
        computed, chosen, failed = self._run(shape, padded, vector, ready)
        scores = [] if computed.hidden is None else self._scores(rows, computed.hidden)
        spent += self._stepping.prepared
        if measured is not None and self._state.device.type == "cpu":
            measured.launched()
        told = self._processing.follow if self._processing.wanted(ready.sampled) else None
        return Ticket(plan, ready.sampled, chosen, scores, spent, measured, failed, told)

    def _shape(self, exact: StepShape) -> tuple[StepShape, bool]:
        """And whether it is a padded one."""
        if not self._padded or not self._capturable(decode=exact.decode is not None, prefill=exact.prefill is not None):
            return exact, False
        shape = padded_shape(exact, self._limits)
        return (exact, False) if shape is None else (shape, True)

    def _capturable(self, *, decode: bool, prefill: bool) -> bool:
        parts = self._parts
        return (
            parts.ops.capturable
            and parts.model.capturable
            and (not decode or parts.decode.capturable)
            and (not prefill or parts.prefill.capturable)
        )

    def _run(
        self,
        shape: StepShape,
        padded: bool,
        vector: Tensor,
        ready: PreparedRows,
    ) -> tuple[Computed, Chosen, Mapping[str, str]]:
        """And by sequence why its row fails."""
        stepping, sampler = self._stepping, self._parts.sampler
        self._settle_rehearsal()
        host_slots = ready.host_slots
        run = self._recordings.run if padded and self._recordings is not None else _plainly
        drafting = stepping.drafting
        processes = self._processing.wanted(ready.sampled)
        told = self._parts.hidden == "all" and shape.prompts
        by_chance = drafting is not None and drafting.by_chance
        if not padded or not sampler.capturable or processes or told or by_chance:
            computed = run((shape,), lambda: stepping.compute(shape, vector))
            if computed.states is not None and drafting is not None:
                drafting.observe_prompts(
                    ready.rows, first_tokens(ready.rows, ready.decode_rows, shape), computed.states
                )
            queries = tuple(1 + (shape.drafts if padded else row.drafts) for row in ready.sampled)
            processed = None
            if processes:
                drafts = self._drafts_seen(ready.sampled, queries, computed)
                processed = self._processing.apply(computed.logits, ready.sampled, queries, drafts)
            if shape.drafts:
                chosen = stepping.verify(computed, host_slots, queries)
            else:
                chosen = stepping.choose(computed, host_slots)
            stepping.tell(chosen)
            if processed is None:
                return computed, chosen, {}
            return computed, replace(chosen, logprobs=rescore(processed, chosen, sampler)), processed.failed
        key = sampler.graph_key(host_slots)

        tells_inside = self._parts.speculator is not None and self._parts.speculator.capturable

        def work() -> tuple[Computed, Chosen]:
            computed = stepping.compute(shape, vector)
            if shape.drafts:
                chosen = stepping.verify(computed, host_slots, (1 + shape.drafts,) * shape.verified, key)
            else:
                chosen = stepping.choose(computed, host_slots, key)
            if tells_inside:
                stepping.tell(chosen)
            return computed, chosen

        last = verification_key(shape, key) if shape.drafts else choice_key(shape.samples, key)
        computed, chosen = run((shape, last), work)
        if not tells_inside:
            stepping.tell(chosen, len(host_slots))
        return computed, chosen, {}

    def _drafts_seen(
        self, rows: Sequence[RowPlan], queries: Sequence[int], computed: Computed
    ) -> Mapping[str, tuple[int, ...]]:
        """By sequence, of rows that ask for logits processors."""
        drafting, verifying = self._stepping.drafting, computed.verifying
        if drafting is None:
            return {}
        return drafting.see(rows, queries, None if verifying is None else verifying.ids, self._processing.slots)

    def _scores(self, rows: Sequence[RowPlan], hidden: Tensor) -> list[tuple[RowPlan, LogprobTensors]]:
        """Of the rows whose prompt tokens are scored."""
        found, at = [], 0
        for row in rows:
            if row.targets:
                own = hidden[at : at + row.query]
                found.append((row, self._stepping.score(own, row.targets, row.top_targets, _SCORE_ROWS)))
            at += row.query
        return found

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
        return self._state.nbytes + self._uploads.nbytes + self._attending.workspace_bytes


def _plainly(_key: tuple[Hashable, ...], work: Callable[[], ResultT]) -> ResultT:
    return work()


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
