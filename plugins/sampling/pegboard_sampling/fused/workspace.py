"""Device memory between the fused sampler's kernels, at addresses that stay.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import values as v
from .best import SCRATCH
from .chunks import COLUMNS

#: Groups of 128 logits that a program reads; that one reads again at a time to list candidates, and in all.
CHUNK_GROUPS, TILE_GROUPS, PART_GROUPS = 32, 8, 16


class Workspace:
    """For N rows at a time, `wide_rows` of which may have many candidates. A graph that was recorded on a smaller one
    still writes to it, so it is kept."""

    @torch.inference_mode(False)
    def __init__(
        self, rows: int, wide_rows: int, vocab_size: int, device: torch.device, before: Workspace | None = None
    ) -> None:
        self.rows = rows
        self.before = before
        self.groups = -(-vocab_size // v.GROUP.value)
        self.chunks = -(-self.groups // CHUNK_GROUPS)
        self.parts = -(-self.groups // PART_GROUPS)
        self._listed_shape = (wide_rows, 2, vocab_size)

        def empty(*shape: int, dtype: torch.dtype, count: int = rows) -> Tensor:
            return torch.empty((count, *shape), dtype=dtype, device=device)

        self.maxima, self.raw_maxima = (empty(self.groups, dtype=torch.float32) for _ in range(2))
        self.statistics = empty(v.STATISTICS.value, self.chunks, dtype=torch.float32)
        self.chunk_ids = empty(v.IDS.value, self.chunks, dtype=torch.int32)
        self.counts = empty(dtype=torch.int32)
        self.profiles = empty(self.chunks, 2, COLUMNS.value, dtype=torch.float32, count=wide_rows)
        self.bounds = empty(2, dtype=torch.float32, count=wide_rows)
        self.part_counts = empty(self.parts, dtype=torch.int32, count=wide_rows)
        self.reached, self.best_keys = (empty(self.parts, dtype=torch.int64, count=wide_rows) for _ in range(2))
        self.candidates = empty(SCRATCH.value, dtype=torch.int64)
        self.support = empty(dtype=torch.int64)
        self.mass = empty(dtype=torch.float32)
        self._listed: Tensor | None = None
        self._noises: Tensor | None = None

    @property
    @torch.inference_mode(False)
    def listed(self) -> Tensor:
        """[wide_rows, 2, V] int64, made when a row first needs it."""
        if self._listed is None:
            self._listed = torch.empty(self._listed_shape, dtype=torch.int64, device=self.counts.device)
            self._noises = self._listed.view(torch.float32)
        return self._listed

    @property
    def noises(self) -> Tensor:
        """The memory of `listed` as float32."""
        return self.listed if self._noises is None else self._noises
