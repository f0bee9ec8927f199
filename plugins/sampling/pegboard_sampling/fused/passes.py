"""The launches that make M choices, each from its row of the logits."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from pegboard.contracts.sampler import LogprobTensors

from ..choice import best_first
from . import values as v
from .best import MOST
from .choices import Choices
from .choosing import choose
from .chunks import read_chunks
from .listing import list_logprobs, spread_logprobs
from .rejecting import refuse_drafts, replace_refused
from .slots import FusedSlots, Path
from .wide import WideStep
from .workspace import CHUNK_GROUPS, Workspace

#: Rows of a launch: CUDA's limit of a grid's second extent.
_MOST_ROWS = 65535
#: Rows in turns begin at multiples of this, so that kernels compiled for aligned addresses serve them.
_ALIGNED = 16
#: Warps of a program: of a pass over the logits, of one that reads tables or judges drafts too, of one for a whole row.
_READ_WARPS, _HEAVY_READ_WARPS, _ROW_WARPS = 4, 8, 16


class Passes:
    """One way of choosing over one state of slots; `rejects`: drafts are judged by rejection sampling."""

    def __init__(self, slots: FusedSlots, rows: int, vocab_size: int, *, rejects: bool, fast: bool) -> None:
        self._slots, self._vocab_size, self._rejects, self._fast = slots, vocab_size, rejects, fast
        self._most = rows
        self._workspace = Workspace(rows, rows, vocab_size, slots.device)

    def run(self, choices: Choices, path: Path, ids: Tensor) -> LogprobTensors | None:
        """Fills ids [M]. Choices that follow no drafts are counted."""
        count = choices.logits.shape[0]
        # There may be as many candidates as tokens: of so much memory there is one share a slot
        most = min(count, self._most if path.wide else _MOST_ROWS)
        if _ALIGNED < most < count:
            most -= most % _ALIGNED
        if most > self._workspace.rows:
            self._workspace = Workspace(most, self._most, self._vocab_size, self._slots.device, before=self._workspace)
        found = [self._run(one, path, ids[part]) for part, one in choices.parts(most)]
        logprobs = [one for one in found if one is not None]
        return _joined(logprobs) if logprobs else None

    def _run(self, choices: Choices, path: Path, ids: Tensor) -> LogprobTensors | None:
        self._read(choices, path)
        if path.wide:
            self._wide(choices, path).choose(ids)
        self._choose(choices, path, ids)
        if self._rejects and choices.drafts is not None:
            self._reject(choices, path, ids)
        return self._list(choices, path, ids) if path.logprobs is not None else None

    def _state(self, choices: Choices, path: Path) -> tuple[Tensor, ...]:
        """floats, integers, words, biases, queries, places; those that no choice of this path reads may be anything."""
        slots = self._slots
        words = slots.words if path.words else None
        biases = slots.biases if path.biases else None
        return (
            slots.floats,
            slots.integers,
            slots.integers if words is None else words,
            slots.floats if biases is None else biases,
            choices.positions if choices.queries is None else choices.queries,
            choices.positions if choices.places is None else choices.places,
        )

    def _adjustments(self, choices: Choices, path: Path) -> dict[str, Any]:
        words = v.NO_WORDS
        if path.words:
            words = v.SLOT_WORDS if choices.places is None else v.TREE_WORDS if choices.trees else v.DRAFT_WORDS
        return {"WORDS": words.value, "BIASES": path.biases}

    def _tells(self, choices: Choices, path: Path) -> bool:
        """Whether what a choice was made from is looked at again."""
        return path.processed or (self._rejects and choices.drafts is not None)

    @property
    def _row_sizes(self) -> dict[str, int]:
        work = self._workspace
        return {
            "GROUPS": max(triton.next_power_of_2(work.groups), MOST.value),
            "CHUNKS": triton.next_power_of_2(work.chunks),
        }

    def _read(self, choices: Choices, path: Path) -> None:
        work, logits = self._workspace, choices.logits
        rejects = self._rejects and choices.drafts is not None and path.noise
        warps = _HEAVY_READ_WARPS if path.words else _READ_WARPS
        read_chunks[(work.chunks, logits.shape[0])](
            logits,
            choices.slots,
            choices.positions,
            *self._state(choices, path),
            work.maxima,
            work.raw_maxima,
            work.statistics,
            work.chunk_ids,
            work.counts,
            work.profiles,
            logits.stride(0),
            self._vocab_size,
            work.groups,
            work.chunks,
            GROUPS=CHUNK_GROUPS,
            **self._adjustments(choices, path),
            ADDS_NOISE=path.noise,
            KEEPS_GROUPS=path.few or path.wide or path.processed,
            SUMS=path.wide or path.processed or rejects,
            PROFILES=path.wide,
            REJECTS=rejects,
            RAW=path.raw,
            FAST=self._fast,
            THREADS=32 * warps,
            num_warps=warps,
        )

    def _wide(self, choices: Choices, path: Path) -> WideStep:
        return WideStep(
            choices=choices,
            work=self._workspace,
            state=self._state(choices, path),
            adjustments=self._adjustments(choices, path),
            row_sizes=self._row_sizes,
            vocab_size=self._vocab_size,
            ranks=path.ranked,
            tells=self._tells(choices, path),
            fast=self._fast,
        )

    def _choose(self, choices: Choices, path: Path, ids: Tensor) -> None:
        work, logits = self._workspace, choices.logits
        choose[(logits.shape[0],)](
            logits,
            choices.slots,
            choices.positions,
            *self._state(choices, path),
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
            **self._row_sizes,
            **self._adjustments(choices, path),
            ADDS_NOISE=path.noise,
            FEW=path.few,
            TELLS=self._tells(choices, path),
            COUNTS=not path.processed and choices.places is None,
            FAST=self._fast,
            num_warps=_ROW_WARPS if path.few else 1,
        )

    def _reject(self, choices: Choices, path: Path, ids: Tensor) -> None:
        work, logits, state = self._workspace, choices.logits, self._state(choices, path)
        count, chunks = logits.shape[0], self._row_sizes["CHUNKS"]
        refuse_drafts[(work.chunks, count)](
            logits,
            choices.slots,
            choices.positions,
            *state,
            choices.drafts,
            logits if choices.probs is None else choices.probs,
            ids,
            work.statistics,
            work.chunk_ids,
            work.support,
            work.mass,
            logits.stride(0),
            0 if choices.probs is None else choices.probs.stride(0),
            self._vocab_size,
            work.chunks,
            CHUNK=CHUNK_GROUPS * v.GROUP.value,
            CHUNKS=chunks,
            **self._adjustments(choices, path),
            PROBS=choices.probs is not None,
            FAST=self._fast,
            num_warps=_HEAVY_READ_WARPS,
        )
        replace_refused[(count,)](
            choices.slots,
            state[1],
            choices.drafts,
            work.statistics,
            work.chunk_ids,
            ids,
            work.chunks,
            CHUNKS=chunks,
            num_warps=1,
        )

    def _list(self, choices: Choices, path: Path, ids: Tensor) -> LogprobTensors:
        work, logits, state = self._workspace, choices.logits, self._state(choices, path)
        asked, count = path.logprobs or 0, logits.shape[0]
        listed = asked if asked <= MOST.value else 0
        chosen = torch.empty(count, dtype=torch.float32, device=logits.device)
        top_ids = torch.empty(count, listed, dtype=torch.int64, device=logits.device)
        top_values = torch.empty(count, listed, dtype=torch.float32, device=logits.device)
        modes = {**self._adjustments(choices, path), "RAW": path.raw, "PROCESSED": path.processed}
        if asked > listed:
            spread = torch.empty(count, self._vocab_size, dtype=torch.float32, device=logits.device)
            spread_logprobs[(work.chunks, count)](
                logits,
                choices.slots,
                *state,
                work.statistics,
                work.support,
                work.mass,
                spread,
                logits.stride(0),
                self._vocab_size,
                work.chunks,
                CHUNK=CHUNK_GROUPS * v.GROUP.value,
                CHUNKS=self._row_sizes["CHUNKS"],
                **modes,
                num_warps=_ROW_WARPS,
            )
            top_values, top_ids = best_first(spread, asked)
        list_logprobs[(count,)](
            logits,
            choices.slots,
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
            **self._row_sizes,
            **modes,
            COUNTS=path.processed and choices.places is None,
            num_warps=_ROW_WARPS,
        )
        return LogprobTensors(chosen=chosen, top_ids=top_ids, top_values=top_values)


def _joined(found: list[LogprobTensors]) -> LogprobTensors:
    if len(found) == 1:
        return found[0]
    return LogprobTensors(
        chosen=torch.cat([one.chosen for one in found]),
        top_ids=torch.cat([one.top_ids for one in found]),
        top_values=torch.cat([one.top_values for one in found]),
    )
