"""The sampler part `fused`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
import triton
from torch import Tensor

from pegboard.contracts.sampler import LogprobTensors, SampleOutput, Sampler, SamplerNeed, SampleRows, SlotOpening
from pegboard.errors import PegboardError

from .. import logprobs
from ..choice import best_first
from .best import MOST
from .choosing import choose
from .chunks import read_chunks
from .gathering import bracket, gather_candidates
from .listing import list_logprobs, spread_logprobs
from .selecting import select
from .slots import FusedSlots, Path
from .workspace import CHUNK_GROUPS, Workspace

_DTYPES = ("float32", "float16", "bfloat16")
#: Ids and 2**31 - 1 - id share an int32.
_MOST_TOKENS = 1 << 24
#: Undecided tokens that a program weighs, and parts, at a time.
_SELECT_BLOCK, _SELECT_PART = 512, 2048
#: Warps of a program: of a pass over the logits, of one that reads tables or lists tokens too, of one for a whole row.
_READ_WARPS, _HEAVY_READ_WARPS, _ROW_WARPS = 4, 8, 16


class FusedSampler(Sampler):
    """One pass over the logits, then as many of them again as the choice can be among: none for greedy rows and for
    those that only add noise, 64 groups of 128 for top-k up to 64; for top-p alone, min-p alone or a greater k another
    pass or two. Nothing is sorted. Rows of all kinds go together.

    Adjustments, scores and noise are float32; weights are summed in integers, so neither place nor neighbours change
    a bit. Same tokens as every sampler for the same seed, but where two perturbed scores are within 1e-4.

    A NaN among a row's logits gives id -1, no token above -inf -2. A +inf logit wins; several share the mass.

    Memory for C slots and a vocabulary V: 4 C V bytes when a slot has penalties or min_tokens, 4 C V when one has a
    bias, 16 C V when one needs more than top-k up to 64."""

    capturable = True

    def __init__(self, need: SamplerNeed, *, interpreted: bool = False) -> None:
        self._vocab_size = need.vocab_size
        #: The device's own logarithm; the interpreter has none.
        self._fast = not interpreted
        on_cuda = need.device.type == "cuda" and not interpreted
        device = torch.device("cuda", need.device.index) if on_cuda else torch.device("cpu")
        self._slots = FusedSlots(need.slots, need.vocab_size, device)
        self._workspace = Workspace(need.slots, need.vocab_size, device)

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
        if need.max_drafts:
            reasons.append("does not verify drafts")
        return reasons

    @classmethod
    def create(cls, need: SamplerNeed, options: Any) -> Self:
        return cls(need)

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
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        if count > self._workspace.rows:
            self._workspace = Workspace(count, self._vocab_size, logits.device, before=self._workspace)
        self._read(logits, rows, path)
        self._choose(logits, rows, path, ids)
        return SampleOutput(ids=ids, logprobs=self._list(logits, rows, path, ids))

    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        self._check(logits)
        return logprobs.of_logits(logits, targets, top)

    def _check(self, logits: Tensor) -> None:
        if logits.dim() != 2 or logits.shape[1] != self._vocab_size:
            raise PegboardError(f"logits are {tuple(logits.shape)}, expected [rows, {self._vocab_size}]")
        if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise PegboardError(f"logits are {logits.dtype}; the fused sampler takes {', '.join(_DTYPES)}")

    def _state(self, logits: Tensor, path: Path) -> tuple[Tensor, ...]:
        """floats, integers, words, biases; tables that no slot of this path reads may be anything."""
        slots = self._slots
        words = slots.words if path.words else None
        biases = slots.biases if path.biases else None
        return (
            slots.floats,
            slots.integers,
            slots.integers if words is None else words,
            slots.floats if biases is None else biases,
        )

    def _read(self, logits: Tensor, rows: SampleRows, path: Path) -> None:
        work = self._workspace
        read_chunks[(work.chunks, logits.shape[0])](
            logits,
            rows.slots,
            rows.positions,
            *self._state(logits, path),
            work.maxima,
            work.raw_maxima,
            work.statistics,
            work.chunk_ids,
            work.counts,
            logits.stride(0),
            self._vocab_size,
            work.groups,
            work.chunks,
            GROUPS=CHUNK_GROUPS,
            WORDS=path.words,
            BIASES=path.biases,
            ADDS_NOISE=path.noise,
            KEEPS_GROUPS=path.few or path.wide or path.processed,
            SUMS=path.wide or path.processed,
            RAW=path.raw,
            FAST=self._fast,
            num_warps=_HEAVY_READ_WARPS if path.words else _READ_WARPS,
        )

    def _choose(self, logits: Tensor, rows: SampleRows, path: Path, ids: Tensor) -> None:
        work, count, state = self._workspace, logits.shape[0], self._state(logits, path)
        sizes = {
            "GROUPS": max(triton.next_power_of_2(work.groups), MOST.value),
            "CHUNKS": triton.next_power_of_2(work.chunks),
            "WORDS": path.words,
            "BIASES": path.biases,
        }
        if path.wide:
            listed = work.listed
            bracket[(work.chunks, count)](
                logits,
                rows.slots,
                *state,
                work.maxima,
                work.statistics,
                work.counts,
                work.profiles,
                work.brackets,
                logits.stride(0),
                self._vocab_size,
                work.groups,
                work.chunks,
                CHUNK_GROUPS=CHUNK_GROUPS,
                **sizes,
                FAST=self._fast,
                num_warps=_READ_WARPS,
            )
            gather_candidates[(work.chunks, count)](
                logits,
                rows.slots,
                *state,
                work.counts,
                work.brackets,
                listed,
                logits.stride(0),
                self._vocab_size,
                listed.shape[2],
                CHUNK_GROUPS=CHUNK_GROUPS,
                WORDS=path.words,
                BIASES=path.biases,
                num_warps=_HEAVY_READ_WARPS,
            )
            select[(count,)](
                rows.slots,
                rows.positions,
                *state[:2],
                work.statistics,
                work.counts,
                work.brackets,
                listed,
                ids,
                work.support,
                work.mass,
                self._vocab_size,
                work.chunks,
                listed.shape[2],
                CHUNKS=sizes["CHUNKS"],
                PROCESSED=path.processed,
                FAST=self._fast,
                BLOCK=_SELECT_BLOCK,
                PART=_SELECT_PART,
                num_warps=_ROW_WARPS,
            )
        choose[(count,)](
            logits,
            rows.slots,
            rows.positions,
            *state,
            work.maxima,
            work.statistics,
            work.chunk_ids,
            work.candidates,
            ids,
            work.support,
            work.mass,
            logits.stride(0),
            self._vocab_size,
            work.groups,
            work.chunks,
            **sizes,
            ADDS_NOISE=path.noise,
            FEW=path.few,
            PROCESSED=path.processed,
            FAST=self._fast,
            num_warps=_ROW_WARPS if path.few else 1,
        )

    def _list(self, logits: Tensor, rows: SampleRows, path: Path, ids: Tensor) -> LogprobTensors | None:
        if path.logprobs is None:
            return None
        work, count, state = self._workspace, logits.shape[0], self._state(logits, path)
        listed = path.logprobs if path.logprobs <= MOST.value else 0
        chosen = torch.empty(count, dtype=torch.float32, device=logits.device)
        top_ids = torch.empty(count, listed, dtype=torch.int64, device=logits.device)
        top_values = torch.empty(count, listed, dtype=torch.float32, device=logits.device)
        modes = {"WORDS": path.words, "BIASES": path.biases, "RAW": path.raw, "PROCESSED": path.processed}
        chunk_slots = triton.next_power_of_2(work.chunks)
        if path.logprobs > listed:
            spread = torch.empty(count, self._vocab_size, dtype=torch.float32, device=logits.device)
            spread_logprobs[(work.chunks, count)](
                logits,
                rows.slots,
                *state,
                work.statistics,
                work.support,
                work.mass,
                spread,
                logits.stride(0),
                self._vocab_size,
                work.chunks,
                CHUNK=4096,
                CHUNKS=chunk_slots,
                **modes,
                num_warps=_ROW_WARPS,
            )
            top_values, top_ids = best_first(spread, path.logprobs)
        list_logprobs[(count,)](
            logits,
            rows.slots,
            *state,
            work.maxima,
            work.raw_maxima,
            work.statistics,
            work.candidates,
            ids,
            work.support,
            work.mass,
            chosen,
            top_ids,
            top_values,
            logits.stride(0),
            self._vocab_size,
            work.groups,
            work.chunks,
            listed,
            GROUPS=max(triton.next_power_of_2(work.groups), MOST.value),
            CHUNKS=chunk_slots,
            **modes,
            num_warps=_ROW_WARPS,
        )
        return LogprobTensors(chosen=chosen, top_ids=top_ids, top_values=top_values)
