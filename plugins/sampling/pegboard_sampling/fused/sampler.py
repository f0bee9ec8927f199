"""The sampler part `fused`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
import triton
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

from .. import logprobs
from ..options import FusedSamplerOptions
from . import values as v
from .choices import Choices
from .passes import Passes
from .slots import STOPS, FusedSlots, Path
from .verifying import keep_drafts, lay_out_choices

_DTYPES = ("float32", "float16", "bfloat16")
#: Ids and 2**31 - 1 - id share an int32.
_MOST_TOKENS = 1 << 24


class FusedSampler(Sampler):
    """One pass over the logits, then as many of them again as the choice can be among: none for greedy rows and for
    those that only add noise, 64 groups of 128 for top-k up to 64; for top-p alone, min-p alone or a greater k another
    pass or two. Nothing is sorted. Rows of all kinds go together.

    Adjustments, scores and noise are float32; weights are summed in integers, so neither place nor neighbours change
    a bit. Same tokens as every sampler for the same seed, but where two perturbed scores are within 1e-4.

    Drafts, in chains or trees, are verified by the same passes, one choice for each query; `verify` allocates its
    results alone, so it may be recorded as `sample` may. With `rejection` what is refused costs another pass over its
    logits.

    A NaN among a row's logits gives id -1, no token above -inf -2. A +inf logit wins; several share the mass.

    Memory for C slots and a vocabulary V: 4 C V bytes when a slot has penalties or min_tokens (or, with drafts, more
    than 8 stop ids), 4 C V when one has a bias, 16 C V when one needs more than top-k up to 64."""

    capturable = True

    def __init__(self, need: SamplerNeed, *, rejects: bool = False, interpreted: bool = False) -> None:
        self._vocab_size = need.vocab_size
        self._max_drafts = need.max_drafts
        self._rejects = rejects
        on_cuda = need.device.type == "cuda" and not interpreted
        device = torch.device("cuda", need.device.index) if on_cuda else torch.device("cpu")
        self._slots = FusedSlots(need.slots, need.vocab_size, device, drafted=need.max_drafts > 0)
        # The interpreter lacks the device's own logarithm
        self._passes = Passes(self._slots, need.slots, need.vocab_size, rejects=rejects, fast=not interpreted)

    @classmethod
    def refusals(cls, need: SamplerNeed, options: Any) -> Sequence[str]:
        reasons = []
        if need.device.type != "cuda" or (need.device.capability or (0, 0)) < (8, 0):
            found = need.device.type if need.device.capability is None else f"capability {need.device.capability}"
            reasons.append(f"needs a CUDA device of compute capability 8.0 or more, not {found}")
        if need.dtype is not None and need.dtype not in _DTYPES:
            reasons.append(f"computes in float32: takes logits in {', '.join(_DTYPES)}, not in {need.dtype}")
        if need.vocab_size > _MOST_TOKENS:
            reasons.append(f"takes vocabularies of at most {_MOST_TOKENS} tokens, not {need.vocab_size}")
        return reasons

    @classmethod
    def create(cls, need: SamplerNeed, options: Any) -> Self:
        return cls(need, rejects=cls.wants_probs(options))

    @classmethod
    def wants_probs(cls, options: FusedSamplerOptions | None) -> bool:
        return options is not None and options.verification == "rejection"

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._slots.open(openings)

    def features(self, host_slots: Sequence[int]) -> frozenset[str]:
        return self._slots.features(host_slots)

    def graph_key(self, host_slots: Sequence[int]) -> Hashable:
        return self._slots.path(host_slots)

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        self._check(logits)
        count = rows.slots.shape[0]
        if logits.shape[0] != count or rows.positions.shape[0] != count or len(rows.host_slots) > count:
            raise PegboardError(
                f"{logits.shape[0]} rows of logits, {count} slots and {rows.positions.shape[0]} positions for "
                f"{len(rows.host_slots)} slots of the host"
            )
        path = rows.key if isinstance(rows.key, Path) else self._slots.path(rows.host_slots)
        ids = torch.empty(count, dtype=torch.int64, device=logits.device)
        if not count:
            return SampleOutput(ids=ids)
        choices = Choices(logits=_dense(logits), slots=rows.slots, positions=rows.positions)
        return SampleOutput(ids=ids, logprobs=self._passes.run(choices, path, ids))

    def verify(self, logits: Tensor, rows: VerifyRows) -> VerifyOutput:
        """`coupled` verification: a draft is kept iff it is what the target itself chooses there, with the
        noise of that position and penalties that count the drafts before it; `rejection` (Leviathan et al. 2023) for
        rows with noise, when the options say so, where a speculator that gives no probs drew its drafts for sure; not
        for trees (see `torch`).
        Log-probabilities are [N, 1 + k] (and [N, 1 + k, m]), meaningful for the kept tokens. Slots beyond host_slots
        are idle."""
        self._check(logits)
        self._check_drafts(logits, rows)
        count, width, device = rows.slots.shape[0], 1 + self._max_drafts, logits.device
        ids, path = (torch.empty(count, width, dtype=torch.int64, device=device) for _ in range(2))
        kept = torch.empty(count, dtype=torch.int64, device=device)
        if not count:
            return VerifyOutput(ids=ids, count=kept, path=path)
        way = rows.key if isinstance(rows.key, Path) else self._slots.path(rows.host_slots)
        trees, parents = rows.parents is not None, rows.ids if rows.parents is None else rows.parents
        # Each at an aligned address, which kernels are compiled for
        slots, positions, places, laid_out, chosen = (
            torch.empty(logits.shape[0], dtype=torch.int64, device=device) for _ in range(5)
        )
        lay_out_choices[(logits.shape[0],)](
            rows.query_start,
            rows.ids,
            parents,
            rows.slots,
            rows.positions,
            slots,
            positions,
            places,
            laid_out,
            laid_out,
            count,
            ROWS=triton.next_power_of_2(count),
            TREES=trees,
            num_warps=1,
        )
        choices = Choices(
            logits=_dense(logits),
            slots=slots,
            positions=positions,
            queries=laid_out if trees else rows.ids,
            places=places,
            drafts=None if trees else laid_out,
            probs=None if rows.probs is None else _dense(rows.probs),
            trees=trees,
        )
        found = self._passes.run(choices, way, chosen)
        words = self._slots.words if way.words else None
        keep_drafts[(count,)](
            chosen,
            laid_out,
            rows.ids,
            parents,
            rows.query_start,
            rows.slots,
            rows.positions,
            self._slots.integers,
            self._slots.stops,
            self._slots.integers if words is None else words,
            ids,
            kept,
            path,
            self._vocab_size,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            STOPS=STOPS,
            WORDS=(v.NO_WORDS if words is None else v.SLOT_WORDS).value,
            TREES=trees,
            num_warps=1,
        )
        return VerifyOutput(
            ids=ids,
            count=kept,
            path=path,
            logprobs=None if found is None else _spread(found, rows.query_start, path),
        )

    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        self._check(logits)
        return logprobs.of_logits(logits, targets, top)

    def _check(self, logits: Tensor) -> None:
        if logits.dim() != 2 or logits.shape[1] != self._vocab_size:
            raise PegboardError(f"logits are {tuple(logits.shape)}, expected [rows, {self._vocab_size}]")
        if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise PegboardError(f"logits are {logits.dtype}; the fused sampler takes {', '.join(_DTYPES)}")

    def _check_drafts(self, logits: Tensor, rows: VerifyRows) -> None:
        count, width = rows.slots.shape[0], 1 + self._max_drafts
        if rows.parents is not None and rows.probs is not None:
            raise PegboardError("drafts of a tree have no distributions (parents and probs exclude each other)")
        if rows.probs is not None and not self._rejects:
            raise PegboardError(
                "verification is `coupled`, which takes no draft distributions: a speculator gives Drafts.probs only "
                "where SpeculatorNeed.wants_probs says so"
            )
        if rows.query_start.shape[0] != count + 1 or rows.positions.shape[0] != count or len(rows.host_slots) > count:
            raise PegboardError(
                f"{count} slots, {rows.query_start.shape[0]} query starts (one more than slots) and "
                f"{rows.positions.shape[0]} positions for {len(rows.host_slots)} slots of the host"
            )
        if logits.shape[0] != rows.ids.shape[0]:
            raise PegboardError(f"{logits.shape[0]} rows of logits for {rows.ids.shape[0]} queries")
        if rows.probs is not None and rows.probs.shape != logits.shape:
            raise PegboardError(f"probs are {tuple(rows.probs.shape)}, logits {tuple(logits.shape)}: they must agree")
        if rows.host_queries and max(rows.host_queries) > width:
            raise PegboardError(
                f"a row has {max(rows.host_queries)} queries; with max_drafts {width - 1} it is {width}"
            )


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _spread(found: LogprobTensors, query_start: Tensor, path: Tensor) -> LogprobTensors:
    """From [T] to those of the queries path [N, W]; of what is not kept another's."""
    at = (query_start[:-1, None] + path.clamp(min=0)).clamp_(max=found.chosen.shape[0] - 1)
    return LogprobTensors(chosen=found.chosen[at], top_ids=found.top_ids[at], top_values=found.top_values[at])
