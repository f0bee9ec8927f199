"""Drafts of a step: asked for, kept by slot, and cut to what was proposed where the host can see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

import torch
from msgspec.structs import replace
from torch import Tensor

from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.scheduler import RowPlan
from pegboard.contracts.speculator import DraftContext, Drafts, Speculator
from pegboard.errors import PluginError

from .adapting import DraftLimits
from .device_state import DeviceState


class Drafting:
    """One speculator on one device's state. Drafts of a step stand in `DeviceState.drafts`.

    `ahead`: the host does not see what is proposed, and rows run as they were planned. Else (a CPU is the host, and
    some speculators work there) drafts are asked for before the step is built, and a row without any runs as if none
    had been planned."""

    def __init__(self, speculator: Speculator, state: DeviceState, limits: DraftLimits | None, vocab_size: int) -> None:
        self._speculator, self._state, self._limits = speculator, state, limits
        self._vocab_size = vocab_size
        self.ahead = state.device.type != "cpu" and not speculator.needs_host_token
        #: Distributions of this step's drafts [R, k, V], and which of its rows each slot's are.
        self._probs: Tensor | None = None
        self._places: dict[int, int] = {}
        #: This step's drafts by sequence, of watched rows, where they were asked for before it.
        self._seen: Mapping[str, tuple[int, ...]] = {}

    @property
    def inside(self) -> bool:
        """Drafts are asked for in the step itself, which may be recorded."""
        return self.ahead and self._speculator.capturable

    @property
    def by_chance(self) -> bool:
        """This step's drafts were asked for before it, with the distributions that they were drawn from."""
        return self._probs is not None and not self.inside

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._speculator.open(openings)

    def settle(self, rows: Sequence[RowPlan], watched: Collection[int]) -> Sequence[RowPlan]:
        """The rows as they will run. The host will `see` the drafts of rows in `watched` slots, one behind another."""
        self._seen = {}
        if watched and self._state.trees is not None:
            rows = [_narrowed(row, 0) if row.slot in watched else row for row in rows]
        if self._limits is not None and any(row.drafts for row in rows):
            allowed = self._limits.next()
            rows = [_narrowed(row, min(row.drafts, allowed)) for row in rows]
        drafting = [row for row in rows if row.drafts]
        self._probs, self._places = None, {}
        if self.inside or not drafting:
            return rows
        state = self._state
        slots = state.upload([row.slot for row in drafting], torch.int64)
        # The host tells -1 where the device knows alone
        last = state.upload([row.tokens[-1] if row.tokens else -1 for row in drafting], torch.int64)
        place = [row.start + len(row.tokens) - 1 if row.tokens else -1 for row in drafting]
        positions = state.upload(place, torch.int64)
        last = torch.where(last < 0, state.last_ids[slots], last)
        positions = torch.where(positions < 0, state.lengths[slots], positions)
        ids = self.propose(slots, last, positions, max(row.drafts for row in drafting))
        self._places = {row.slot: place for place, row in enumerate(drafting)}
        if self.ahead:
            return rows
        found = (ids >= 0).int().cumprod(1).sum(1).tolist()
        counts = {row.id: min(row.drafts, count) for row, count in zip(drafting, found, strict=True)}
        if any(row.slot in watched for row in drafting):
            listed = zip(drafting, ids.tolist(), strict=True)
            self._seen = {row.id: tuple(own[: counts[row.id]]) for row, own in listed if row.slot in watched}
        return [_narrowed(row, counts[row.id]) if row.drafts else row for row in rows]

    def see(
        self, rows: Sequence[RowPlan], queries: Sequence[int], ids: Tensor | None, watched: Collection[int]
    ) -> Mapping[str, tuple[int, ...]]:
        """This step's drafts by sequence, of rows in `watched` slots. Each row has so many `queries` of ids [S] (see
        VerifyRows). Where drafts have not left the device, this waits for them, and the step beneath."""
        if not self.ahead:
            return self._seen
        if ids is None or not any(row.drafts and row.slot in watched for row in rows):
            return {}
        listed, found, at = ids.tolist(), {}, 0
        for row, count in zip(rows, queries, strict=True):
            if row.slot in watched:
                found[row.id] = tuple(takewhile(lambda draft: draft >= 0, listed[at + 1 : at + 1 + row.drafts]))
            at += count
        return found

    def propose(self, slots: Tensor, last_ids: Tensor, positions: Tensor, drafts: int) -> Tensor:
        """Drafts [R, k] of rows whose last token stands at `positions` [R]; -1: none."""
        context = DraftContext(slots=slots, last_ids=last_ids, positions=positions, taps=(), batch=None, drafts=drafts)
        made = self._speculator.propose(context)
        self._check(made, slots.shape[0])
        ids, kept = made.ids[:, :drafts], self._state.drafts[:, :drafts]  # the step reads no others
        ids = ids.masked_fill(ids >= self._vocab_size, -1)  # nobody's tokens, and no rows of an embedding
        proposed = ids
        if ids.shape[1] < drafts:
            ids = torch.nn.functional.pad(ids, (0, drafts - ids.shape[1]), value=-1)
        kept.index_copy_(0, slots, ids)
        if self._state.trees is not None and made.parents is not None:
            parents = made.parents[:, :drafts]
            before = torch.arange(parents.shape[1], device=parents.device)
            self._state.trees.put(slots, parents.minimum(before).clamp_(min=0))
        kept[self._state.idle].fill_(-1)
        self._probs = None if made.probs is None else made.probs[:, :drafts]
        return proposed

    def observe(self, slots: Tensor, ids: Tensor, hidden: Tensor | None) -> None:
        """ids [R, m]: what was kept, negative beyond it; hidden [R, m, E]: from what, for a speculator that asks."""
        kept = ids >= 0
        ids, count = ids.masked_fill(~kept, -1), kept.sum(1)
        self._speculator.observe(slots, ids, count)
        if hidden is not None:
            self._speculator.observe_hidden(slots, ids, count, hidden)

    def observe_prompts(self, rows: Sequence[RowPlan], first: Sequence[int], states: Tensor) -> None:
        """states [T, E] of the step's tokens; `first`: where each row's begin."""
        for row, at in zip(rows, first, strict=True):
            count = len(row.tokens) - row.samples  # what follows the last one is observed, once it is chosen
            if count > 0:
                self._speculator.observe_prompt(row.slot, row.start, states[at : at + count])

    def probs_inside(self, query_start: Tensor, queries: int) -> Tensor | None:
        """[T, V] for the queries of the rows that were asked for in the step itself, or None."""
        if self._probs is None:
            return None
        begin = query_start.long()
        row = torch.repeat_interleave(begin.diff(), output_size=queries)
        place = torch.arange(queries, device=begin.device) - begin[row] - 1
        return self._probs[row, place.clamp_(min=0)]

    def probs(self, host_slots: Sequence[int], host_queries: Sequence[int]) -> Tensor | None:
        """[T, V] for the queries of these rows, which were asked for before the step, or None."""
        if self._probs is None:
            return None
        width = self._probs.shape[1]
        index = [
            self._places.get(slot, 0) * width + max(query - 1, 0)
            for slot, queries in zip(host_slots, host_queries, strict=True)
            for query in range(queries)
        ]
        return self._probs.flatten(0, 1)[self._state.upload(index, torch.int64)]

    def _check(self, made: Drafts, rows: int) -> None:
        """What can be seen without waiting for the device."""
        name = type(self._speculator).__name__
        if not isinstance(made, Drafts):
            raise PluginError(f"{name}.propose gave {type(made).__name__}, must give Drafts")
        given = {"ids": made.ids} | ({} if made.parents is None else {"parents": made.parents})
        for what, found in given.items():
            fits = isinstance(found, Tensor) and found.dtype == torch.int64 and found.dim() == 2
            if not fits or found.shape[0] != rows:
                raise PluginError(f"{name}.propose gave {what} {_shown(found)}, must be int64 [{rows}, drafts]")
        if (made.parents is None) != (self._state.trees is None):
            said, gave = ("trees", "a chain") if made.parents is None else ("chains", "a tree")
            raise PluginError(f"{name}.describe said that it drafts {said}, and propose gave {gave}")
        if made.parents is not None and (made.parents.shape != made.ids.shape or made.probs is not None):
            raise PluginError(f"{name}.propose gave a tree with probs, or without a parent of each draft")
        if made.probs is not None:
            shape = tuple(made.ids.shape)
            if not isinstance(made.probs, Tensor) or made.probs.dim() != 3 or made.probs.shape[:2] != shape:
                raise PluginError(f"{name}.propose gave probs {_shown(made.probs)}, must be {[*shape, 'vocabulary']}")


def _shown(found: object) -> str:
    if not isinstance(found, Tensor):
        return type(found).__name__
    return f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"


def _narrowed(row: RowPlan, drafts: int) -> RowPlan:
    if drafts == row.drafts:
        return row
    return replace(row, query=row.query - row.drafts + drafts, drafts=drafts)
