"""The reference sampler, on any device. `choice` holds the arithmetic, `slots` the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.sampler import (
    LogprobTensors,
    SampleOutput,
    Sampler,
    SamplerNeed,
    SampleRows,
    SlotOpening,
    VerifyOutput,
    VerifyRows,
)
from pegboard.errors import PegboardError

from . import logprobs
from .choice import Candidates, Draw, all_candidates, pick_from_all, top_k_candidates, top_p_candidates
from .options import TorchSamplerOptions
from .rejection import choose_or_accept
from .slots import Kind, SlotTable
from .trees import DraftTree

_ADJUSTMENTS = frozenset({"penalties", "bias", "min_tokens"})


class _Choices(msgspec.Struct, frozen=True, kw_only=True):
    """M choices to make: row `source` of the logits each (None: the rows in order), for a slot, at a position."""

    source: Tensor | None
    slots: Tensor
    positions: Tensor
    host_slots: tuple[int, ...]
    #: [M, j] tokens of the slot's text before this choice that are not yet counted, -1 for none.
    path: Tensor | None = None
    #: [M] drafts to accept or refuse by rejection sampling, -1 for none; and [M, V] what they were drawn from.
    drafts: Tensor | None = None
    probs: Tensor | None = None


class TorchSampler(Sampler):
    """Rows with the same needs are processed together: greedy rows cost one pass, noise is computed only for
    tokens that can still win. Penalties and bias are applied in float32 (float64 for float64 logits), temperature and
    everything after it in float64.

    A NaN among a row's logits gives id -1, no token above -inf -2. A +inf logit wins; several share the mass.
    """

    #: Rows are gathered by what the host knows of their slots, and the pool of counts moves when it grows.
    capturable = False
    #: Drafts are verified by rejection sampling, not by coupling.
    _rejects = False

    def __init__(self, need: SamplerNeed) -> None:
        self._vocab_size = need.vocab_size
        self._max_drafts = need.max_drafts
        device = need.device
        self._table = SlotTable(
            need.slots,
            need.vocab_size,
            torch.device(device.type, device.index) if device.type == "cuda" else torch.device(device.type),
        )

    @classmethod
    def refusals(cls, need: SamplerNeed, options: Any) -> Sequence[str]:
        return ()

    @classmethod
    def create(cls, need: SamplerNeed, options: Any) -> Self:
        made = cls(need)
        made._rejects = cls.wants_probs(options)
        return made

    @classmethod
    def wants_probs(cls, options: TorchSamplerOptions | None) -> bool:
        return options is not None and options.verification == "rejection"

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._table.open(openings)

    def features(self, host_slots: Sequence[int]) -> frozenset[str]:
        return frozenset().union(*(self._table.facts(slot).features for slot in host_slots))

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        self._check_width(logits)
        count = len(rows.host_slots)
        if logits.shape[0] != count or rows.slots.shape[0] != count:
            raise PegboardError(
                f"{logits.shape[0]} rows of logits and {rows.slots.shape[0]} slots for {count} slots of the host"
            )
        choices = _Choices(source=None, slots=rows.slots, positions=rows.positions, host_slots=rows.host_slots)
        ids, found = self._choose(logits, choices)
        self._table.advance(rows.slots, ids[:, None], rows.host_slots)
        return SampleOutput(ids=ids, logprobs=found.result((count,)) if found else None)

    def verify(self, logits: Tensor, rows: VerifyRows) -> VerifyOutput:
        """`coupled` verification: a draft is kept iff it is what the target itself chooses there, with the noise of
        that position and penalties that count the drafts before it. `rejection` (see there) for rows with noise, when
        the options say so; a speculator that gives no probs drew its drafts for sure. Of several drafts that were drawn
        for sure, as in a tree, rejection would keep just what the target chooses: trees are always `coupled`.
        Log-probabilities are [N, 1 + k] (and [N, 1 + k, m]), meaningful for the kept tokens."""
        self._check_width(logits)
        if rows.parents is not None and rows.probs is not None:
            raise PegboardError("drafts of a tree have no distributions (parents and probs exclude each other)")
        if rows.probs is not None and not self._rejects:
            raise PegboardError(
                "verification is `coupled`, which takes no draft distributions: a speculator gives Drafts.probs only "
                "where SpeculatorNeed.wants_probs says so"
            )
        count, width = len(rows.host_slots), 1 + self._max_drafts
        queries = rows.host_queries or (width,) * count
        step, start = torch.arange(width, device=logits.device), rows.query_start.long()
        if rows.host_queries is None:  # all that there might be is looked at
            row = torch.arange(count, device=logits.device).repeat_interleave(width)
            place, end = step.repeat(count), start[1:][row]
            source = (start[row] + place).minimum(end - 1).clamp_(min=0)
            own = rows.ids[source].masked_fill_(start[row] + place >= end, -1)
            parents = None if rows.parents is None else rows.parents[source]
        else:
            row = torch.repeat_interleave(start.diff(), output_size=sum(queries))
            place = torch.arange(sum(queries), device=logits.device) - start[row]
            source, own, parents = None, rows.ids, rows.parents
        tree, depth = None, place
        if parents is not None:
            tree = DraftTree(own.new_zeros(count, width).index_put_((row, place), parents.clamp(min=0)))
            depth = tree.depth[row, place]
        drafts = own.new_full((count, width), -1).index_put_((row, place), own)[:, 1:]  # [N, k]
        # What lies before each choice: in a chain, before choice j, drafts 0 .. j - 1
        before = step[:-1] < place[:, None] if tree is None else tree.ancestry[row, place][:, 1:]
        path = drafts[row].masked_fill_(~before, -1)
        choices = _Choices(
            source=source,
            slots=rows.slots[row],
            positions=rows.positions[row] + depth,
            host_slots=tuple(slot for slot, many in zip(rows.host_slots, queries, strict=True) for _ in range(many)),
            path=path if width > 1 else None,
            drafts=_pad(drafts, (0, 1))[row, place] if self._rejects and tree is None else None,
            probs=None if rows.probs is None else _next(rows.probs, source),
        )
        chosen, found = self._choose(logits, choices)
        ids = own.new_full((count, width), -1).index_put_((row, place), chosen)
        if tree is None:
            agreed = (drafts == ids[:, :-1]) & (drafts >= 0)
            kept, ways = 1 + agreed.cumprod(1).sum(1), step.expand_as(ids)
        else:
            ids, ways = tree.walk(_pad(drafts, (1, 0)), ids)
            kept = (ways >= 0).sum(1)
        ends = self._table.is_end(rows.slots, ids)
        first_end = torch.where(ends, step, width).amin(1)
        room = self._table.number("max_length", rows.slots) - rows.positions
        kept = kept.minimum(first_end + 1).minimum(room).clamp_(min=0)
        beyond = step >= kept[:, None]
        ids = ids.masked_fill(beyond, -1)
        self._table.advance(rows.slots, ids, rows.host_slots)
        return VerifyOutput(
            ids=ids,
            count=kept,
            path=ways.masked_fill(beyond, -1),
            logprobs=self._spread(found, row * width + place, ways) if found else None,
        )

    @staticmethod
    def _spread(found: logprobs.LogprobBuffer, places: Tensor, ways: Tensor) -> LogprobTensors:
        """Of the queries ways [N, W], those of all queries standing at `places` of as many."""
        spread = found.spread(places, (ways.shape[0], ways.shape[1]))
        index = ways.clamp(min=0)
        wide = index[:, :, None].expand(-1, -1, spread.top_ids.shape[2])
        return LogprobTensors(
            chosen=spread.chosen.gather(1, index),
            top_ids=spread.top_ids.gather(1, wide),
            top_values=spread.top_values.gather(1, wide),
        )

    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        self._check_width(logits)
        return logprobs.of_logits(logits, targets, top)

    def _check_width(self, logits: Tensor) -> None:
        if logits.dim() != 2 or logits.shape[1] != self._vocab_size:
            raise PegboardError(f"logits are {tuple(logits.shape)}, expected [rows, {self._vocab_size}]")

    def _choose(self, logits: Tensor, choices: _Choices) -> tuple[Tensor, logprobs.LogprobBuffer | None]:
        """Ids [M], and log-probabilities when a slot asks for them."""
        facts = [self._table.facts(slot) for slot in choices.host_slots]
        groups: dict[tuple[Kind, frozenset[str], bool, bool], list[int]] = {}
        for index, fact in enumerate(facts):
            asks = fact.logprobs is not None
            key = (fact.kind, fact.features & _ADJUSTMENTS, asks, asks and fact.processed_logprobs)
            groups.setdefault(key, []).append(index)
        wanted = [fact.logprobs for fact in facts if fact.logprobs is not None]
        found = None
        if wanted:
            found = logprobs.LogprobBuffer(len(facts), min(max(wanted), self._vocab_size), logits)
        ids = torch.empty(len(facts), dtype=torch.int64, device=logits.device)
        for (kind, adjustments, asks, processed), members in groups.items():
            every = len(members) == len(facts)
            rows = torch.arange(len(facts), device=logits.device) if every else self._table.tensor(members)
            source = rows if choices.source is None else choices.source[rows]
            raw = logits if every and choices.source is None else logits[source]
            slots = choices.slots[rows]
            path = choices.path[rows] if choices.path is not None else None
            adjusted = self._table.adjust(raw, slots, adjustments, path) if adjustments else raw
            greatest_k = max(facts[member].top_k for member in members)
            drafts = None if choices.drafts is None else choices.drafts[rows]
            probs = None if choices.probs is None else choices.probs[rows]
            chosen, candidates = self._group(
                adjusted, slots, choices.positions[rows], kind, greatest_k, processed, drafts, probs
            )
            if adjustments:  # a NaN may have been masked
                chosen = chosen.masked_fill(raw.amax(-1).isnan(), -1)
            ids[rows] = chosen
            if found is not None and asks:
                top = max(facts[member].logprobs or 0 for member in members)
                found.put(
                    rows,
                    logprobs.of_logits(raw, chosen, top)
                    if candidates is None
                    else logprobs.of_candidates(candidates, chosen, top, self._vocab_size),
                )
        return ids, found

    def _group(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        kind: Kind,
        greatest_k: int,
        processed: bool,
        drafts: Tensor | None,
        probs: Tensor | None,
    ) -> tuple[Tensor, Candidates | None]:
        """Choices of rows of one kind, -1 or -2 where there is none; with `processed` what they were chosen from.
        Greedy rows choose from the adjusted logits, at temperature 1."""
        peak, first = logits.max(-1)
        number = self._table.number
        temperature = number("temperature", slots)
        draw = Draw(
            peak=peak.double()[:, None],
            temperature=(torch.ones_like(temperature) if kind == "greedy" else temperature)[:, None],
            top_p=number("top_p", slots)[:, None],
            min_p=number("min_p", slots)[:, None],
            seeds=number("seed", slots),
            positions=positions,
        )
        if kind == "greedy":
            chosen = first
            candidates = (
                all_candidates(logits, replace(draw, min_p=torch.zeros_like(draw.min_p))) if processed else None
            )
        elif kind == "noise" and not processed and drafts is None:
            chosen, candidates = pick_from_all(logits, draw), None
        else:
            if kind == "top_k":
                candidates = top_k_candidates(logits, draw, number("top_k", slots)[:, None], greatest_k)
            elif kind == "top_p":
                candidates = top_p_candidates(logits, draw)
            else:
                candidates = all_candidates(logits, draw)
            chosen = candidates.pick(draw) if drafts is None else choose_or_accept(candidates, draw, drafts, probs)
        chosen = chosen.masked_fill(peak == -torch.inf, -2).masked_fill(peak.isnan(), -1)
        return chosen, candidates if processed else None


def _pad(drafts: Tensor, sides: tuple[int, int]) -> Tensor:
    """With columns of -1 on both sides, which are no drafts."""
    return torch.nn.functional.pad(drafts, sides, value=-1)


def _next(probs: Tensor, source: Tensor | None) -> Tensor:
    """What the draft after each query was drawn from: the next row of probs [T, V]."""
    following = torch.arange(1, probs.shape[0] + 1, device=probs.device).clamp_(max=probs.shape[0] - 1)
    return probs[following if source is None else following[source]]
