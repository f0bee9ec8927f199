"""What the device does in a step of one shape, from the host's vector to the chosen ids. It can be recorded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionBackend, LayerCache
from pegboard.contracts.model import DecoderModel, ModelSpec, StepContext
from pegboard.contracts.ops import Ops
from pegboard.contracts.processor import LogitsProcessor
from pegboard.contracts.sampler import LogprobTensors, Sampler, SampleRows, VerifyRows
from pegboard.contracts.speculator import Speculator
from pegboard.errors import PegboardError

from .adapting import DraftLimits
from .attending import Attending
from .batching import Verifying, unpack
from .device_state import DeviceState
from .drafting import Drafting
from .step_shape import StepShape


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
        speculator: Speculator | None = None,
        hidden: Literal["none", "kept", "all"] = "none",
        tree_depth: int | None = None,
        processors: Mapping[str, LogitsProcessor] = MappingProxyType({}),
    ) -> None:
        self.model, self.spec, self.ops = model, spec, ops
        self.prefill, self.decode, self.sampler = prefill, decode, sampler
        #: And the hidden states that it asks for, and the depth of its trees (`SpeculatorSpec`).
        self.speculator, self.hidden, self.tree_depth = speculator, hidden, tree_depth
        #: Logits processors by name, in the order in which they run.
        self.processors = processors

    def replace(self, **parts: Any) -> RunnerParts:
        """The same with other parts."""
        return RunnerParts(**(vars(self) | parts))


class Computed(msgspec.Struct, frozen=True):
    """What the model gives: hidden [T, E] where prompts are scored, and for the S choices of the step logits [S, V],
    slots and positions [S]; logits None: nothing is chosen. With drafts slots and positions are those of N rows and of
    their first choices. For a speculator that asks, after the final norm: `chosen_from` [S, E], what choices are made
    from, and `states` [T, E] of every token in a step that may have prompts. `draft_probs` [S, V]: what the drafts were
    drawn from that were asked for in the step itself, for a sampler that asks."""

    hidden: Tensor | None
    logits: Tensor | None
    slots: Tensor
    positions: Tensor
    verifying: Verifying | None
    chosen_from: Tensor | None = None
    states: Tensor | None = None
    draft_probs: Tensor | None = None


class Observed(msgspec.Struct, frozen=True):
    """For slots [N] ids [N, m], negative beyond what was kept, and from what they were chosen, [N, m, E]."""

    slots: Tensor
    ids: Tensor
    hidden: Tensor | None


class Chosen(msgspec.Struct, frozen=True):
    """ids [S] int64; None: nothing was chosen. With drafts ids [N, 1 + k], of which `count` [N] are kept, and as many
    log-probabilities; `drafted` [N]: drafts that were there. `observed`: what a speculator is to be told."""

    ids: Tensor | None
    logprobs: LogprobTensors | None
    count: Tensor | None = None
    drafted: Tensor | None = None
    observed: Observed | None = None


class Stepping:
    """The model and the sampler on one device's state. `vocab_limit`: ids from here on are padding of the head and are
    never chosen."""

    def __init__(
        self,
        parts: RunnerParts,
        state: DeviceState,
        attending: Attending,
        caches: tuple[LayerCache, ...],
        vocab_limit: int,
        limits: DraftLimits | None = None,
    ) -> None:
        self._parts, self._state, self._attending, self._caches = parts, state, attending, caches
        self._vocab_limit = vocab_limit
        self.drafting = None if parts.speculator is None else Drafting(parts.speculator, state, limits, vocab_limit)
        #: Host seconds that `compute` has spent before the model; a replayed step spends none.
        self.prepared = 0.0

    def compute(self, shape: StepShape, vector: Tensor) -> Computed:
        """Attention, layers and head; rows are as long as they grow afterwards."""
        parts, state = self._parts, self._state
        begin = perf_counter()
        step = unpack(vector, shape, state, parts.ops, self.drafting)
        self._attending.begin(step.batch)
        self.prepared += perf_counter() - begin
        told = parts.hidden == "all" and shape.prompts
        draft_probs = None
        if step.verifying is not None and self.drafting is not None and self.drafting.inside:
            draft_probs = self.drafting.probs_inside(step.verifying.query_start, shape.samples)
        # Of as many as there are tokens nobody could tell whether the model has left the others out
        outputs = None if told or shape.scores or shape.samples >= shape.tokens else step.outputs
        context = StepContext(
            batch=step.batch, ops=parts.ops, caches=self._caches, attend=self._attending, outputs=outputs
        )
        hidden = parts.model.forward(context).hidden
        state.lengths.index_copy_(0, step.slots, step.ends)
        logits = chosen_from = None
        if shape.samples:
            # A model may have left out what nobody wants
            narrowed = outputs is not None and hidden.shape[0] == shape.samples
            last = hidden if step.outputs is None or narrowed else hidden[step.outputs]
            logits = self.logits(last)
            chosen_from = None if parts.hidden == "none" else parts.model.final(last, parts.ops)
        return Computed(
            hidden if shape.scores else None,
            logits,
            step.sample_slots,
            step.sample_positions,
            step.verifying,
            chosen_from,
            parts.model.final(hidden, parts.ops) if told else None,
            draft_probs,
        )

    def choose(self, computed: Computed, host_slots: tuple[int, ...], key: Hashable = None) -> Chosen:
        """For the first choices of `computed`, whose slots are `host_slots`; with the sampler's `key` for all of them,
        those of idle rows too, as a recorded step needs it."""
        logits, slots, positions, hidden = computed.logits, computed.slots, computed.positions, computed.chosen_from
        if logits is None or not host_slots:
            return Chosen(None, None)
        if key is None:
            wanted = slice(0, len(host_slots))
            logits, slots, positions = logits[wanted], slots[wanted], positions[wanted]
            hidden = None if hidden is None else hidden[wanted]
        rows = SampleRows(slots=slots, positions=positions, host_slots=host_slots, key=key)
        output = self._parts.sampler.sample(logits, rows)
        # A failed row (-1) must not feed itself an id that is none.
        self._state.last_ids.index_copy_(0, slots, output.ids.clamp(min=0))
        observed = None
        if self.drafting is not None:
            observed = Observed(slots, output.ids[:, None], None if hidden is None else hidden[:, None])
        return Chosen(output.ids, output.logprobs, observed=observed)

    def verify(
        self, computed: Computed, host_slots: tuple[int, ...], host_queries: tuple[int, ...], key: Hashable = None
    ) -> Chosen:
        """Accept drafts and choose one token more; rows are as long as what they kept. With the sampler's `key` for all
        rows of `computed`, and `host_queries` of all, as in `choose`."""
        logits, slots, verifying, state = computed.logits, computed.slots, computed.verifying, self._state
        if logits is None or verifying is None or self.drafting is None:
            raise PegboardError("a step without drafts has nothing to verify")
        # Idle rows come last
        count, queries = len(host_queries), sum(host_queries)
        logits, slots, positions = logits[:queries], slots[:count], computed.positions[:count]
        begin, ids = verifying.query_start[: count + 1], verifying.ids[:queries]
        probs = computed.draft_probs
        rows = VerifyRows(
            slots=slots,
            query_start=begin,
            positions=positions,
            ids=ids,
            parents=None if verifying.parents is None else verifying.parents[:queries],
            probs=self.drafting.probs(host_slots, host_queries) if probs is None else probs[:queries],
            host_slots=host_slots,
            host_queries=host_queries,
            key=key,
        )
        output = self._parts.sampler.verify(logits, rows)
        kept = output.count
        if key is not None:  # an idle row may have kept anything
            kept = kept.masked_fill(slots == state.idle, 0)
        last = output.ids.gather(1, (kept - 1).clamp_(min=0)[:, None])[:, 0]
        # A row that had ended before keeps nothing
        state.last_ids.index_copy_(0, slots, torch.where(kept > 0, last.clamp(min=0), state.last_ids[slots]))
        state.lengths.index_copy_(0, slots, positions - 1 + kept)
        if verifying.parents is not None:
            self._compact(slots, positions - 1, output.path)
        hidden, chosen = computed.chosen_from, output.ids
        if len(set(host_queries)) == 1:  # as in a padded step: nothing must be gathered
            each = host_queries[0]
            drafted = (ids.view(count, each)[:, 1:] >= 0).sum(1)
            chosen = chosen[:, :each]
            if hidden is not None and verifying.parents is None:
                hidden = hidden[:queries].view(count, each, -1)
        else:
            real = torch.nn.functional.pad((ids >= 0).cumsum(0), (1, 0))
            drafted = real[begin[1:].long()] - real[begin[:-1].long() + 1]
        if hidden is not None and hidden.dim() == 2:
            hidden = hidden[begin[:-1, None] + output.path[:, : chosen.shape[1]].clamp(min=0)]
        return Chosen(output.ids, output.logprobs, kept, drafted, Observed(slots, chosen, hidden))

    def tell(self, chosen: Chosen, count: int | None = None) -> None:
        """The speculator what was kept; of the first `count` rows, where others are idle."""
        told = chosen.observed
        if self.drafting is not None and told is not None:
            slots, ids, hidden = told.slots[:count], told.ids[:count], told.hidden
            self.drafting.observe(slots, ids, None if hidden is None else hidden[:count])

    def _compact(self, slots: Tensor, starts: Tensor, path: Tensor) -> None:
        """Entries of kept queries, path [N, W] with -1 beyond, move behind one another from starts [N] on."""
        state, parts = self._state, self._parts
        inside = torch.arange(path.shape[1], device=path.device)
        kept = path >= 0
        source, target = starts[:, None] + path.clamp(min=0), starts[:, None] + inside
        for index, group in enumerate(state.groups):
            if group.kind == "state":
                continue
            moved = [torch.where(kept, state.place(index, slots, one), 0).flatten() for one in (source, target)]
            for cache in self._caches:
                if cache.group == index:
                    parts.ops.move_entries(cache, *moved)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N, V]"""
        logits = self._parts.model.logits(hidden, self._parts.ops)
        if self._vocab_limit < logits.shape[1]:
            logits[:, self._vocab_limit :] = float("-inf")
        return logits

    def score(self, hidden: Tensor, targets: Sequence[int], top: int, rows: int) -> LogprobTensors:
        """Of `targets`, the ids after the tokens of hidden [N, E]; `rows`: of logits that are held at a time."""
        wanted = self._state.upload([max(t, 0) for t in targets], torch.int64)
        pieces = []
        for first in range(0, len(targets), rows):
            logits = self.logits(hidden[first : first + rows])
            pieces.append(self._parts.sampler.score(logits, wanted[first : first + rows], top))
        return LogprobTensors(
            chosen=torch.cat([p.chosen for p in pieces]),
            top_ids=torch.cat([p.top_ids for p in pieces]),
            top_values=torch.cat([p.top_values for p in pieces]),
        )
