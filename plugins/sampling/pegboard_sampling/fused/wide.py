"""The launches for rows whose choice may be among many tokens: bound them, list them, choose."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from . import values as v
from .bounding import bound_candidates
from .choices import Choices
from .gathering import gather_candidates
from .picking import pick
from .selecting import select
from .workspace import PART_GROUPS, TILE_GROUPS, Workspace

#: Warps of a program: of one that looks for a row's bound, or counts tokens for it; of a part of a row; of one that
#: looks at what is listed of a row.
_BOUND_WARPS, _RANK_WARPS = 1, 4
_PART_WARPS = 1
_PICK_WARPS, _SELECT_WARPS = 16, 16
#: Listed tokens that a program weighs at a time; at least one of each part.
_PICK_BLOCK = 2048
#: Undecided tokens that a program weighs, and parts, at a time.
_SELECT_BLOCK, _SELECT_PART = 512, 2048


class WideStep(NamedTuple):
    """`state` and `adjustments`: of each kernel that reads logits. `ranks`: some rows count tokens; `tells`: what takes
    part is looked at again."""

    choices: Choices
    work: Workspace
    state: tuple[Tensor, ...]
    adjustments: dict[str, Any]
    row_sizes: dict[str, int]
    vocab_size: int
    ranks: bool
    tells: bool
    fast: bool

    def choose(self, ids: Tensor) -> None:
        """Fills ids [M] of these rows."""
        picks = not self.ranks and not self.tells
        self._bound()
        self._gather(picks)
        if picks:
            self._pick(ids)
        else:
            self._select(ids)

    def _bound(self) -> None:
        work = self.work
        bound_candidates[(self.choices.logits.shape[0],)](
            self.choices.slots,
            *self.state[:2],
            work.maxima,
            work.statistics,
            work.profiles,
            work.bounds,
            self.vocab_size,
            work.groups,
            work.chunks,
            **self.row_sizes,
            num_warps=_RANK_WARPS if self.ranks else _BOUND_WARPS,
        )

    def _gather(self, picks: bool) -> None:
        work, logits = self.work, self.choices.logits
        gather_candidates[(work.parts, logits.shape[0])](
            logits,
            self.choices.slots,
            self.choices.positions,
            *self.state,
            work.maxima,
            work.counts,
            work.bounds,
            work.part_counts,
            work.reached,
            work.best_keys,
            work.listed,
            work.noises,
            logits.stride(0),
            self.vocab_size,
            work.groups,
            work.parts,
            work.listed.shape[2],
            TILE_GROUPS=TILE_GROUPS,
            TILES=PART_GROUPS // TILE_GROUPS,
            **self.adjustments,
            CHOOSES=picks,
            FAST=self.fast,
            THREADS=32 * _PART_WARPS,
            num_warps=_PART_WARPS,
        )

    def _pick(self, ids: Tensor) -> None:
        work, wide = self.work, triton.next_power_of_2(self.work.parts)
        pick[(self.choices.logits.shape[0],)](
            self.choices.slots,
            *self.state[:2],
            work.statistics,
            work.profiles,
            work.part_counts,
            work.reached,
            work.best_keys,
            work.listed,
            work.noises,
            ids,
            work.chunks,
            work.parts,
            work.listed.shape[2],
            PART_GROUPS * v.GROUP.value,
            CHUNKS=self.row_sizes["CHUNKS"],
            PARTS=wide,
            WIDTH=max(1, _PICK_BLOCK // wide),
            num_warps=_PICK_WARPS,
        )

    def _select(self, ids: Tensor) -> None:
        work = self.work
        select[(self.choices.logits.shape[0],)](
            self.choices.slots,
            self.choices.positions,
            *self.state[:2],
            work.statistics,
            work.counts,
            work.bounds,
            work.listed,
            ids,
            work.support,
            work.mass,
            self.vocab_size,
            work.chunks,
            work.listed.shape[2],
            CHUNKS=self.row_sizes["CHUNKS"],
            TELLS=self.tells,
            FAST=self.fast,
            BLOCK=_SELECT_BLOCK,
            PART=_SELECT_PART,
            num_warps=_SELECT_WARPS,
        )
