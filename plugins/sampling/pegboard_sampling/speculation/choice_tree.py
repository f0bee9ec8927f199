"""Which of the heads' choices make up a tree of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ChoiceTree:
    """Paths in the order of drafts: short ones first, so that the first few of them are a tree as well."""

    def __init__(self, paths: Sequence[Sequence[int]], device: torch.device) -> None:
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        places = {(): 0} | {path: place for place, path in enumerate(ordered, 1)}
        self._depths = [len(path) for path in ordered]
        self._ranks = [path[-1] for path in ordered]
        self._heads = torch.tensor([depth - 1 for depth in self._depths], device=device)
        self._picked = torch.tensor(self._ranks, device=device)
        #: [k] int64, as in `Drafts.parents`.
        self.parents = torch.tensor([places[path[:-1]] for path in ordered], device=device)

    def __len__(self) -> int:
        return len(self._depths)

    @property
    def depth(self) -> int:
        return self._depths[-1]

    def asks(self, drafts: int) -> tuple[int, int]:
        """Of the first so many drafts: how many heads give them, and how many choices of each are needed."""
        return self._depths[drafts - 1], 1 + max(self._ranks[:drafts])

    def ids(self, best: Tensor, drafts: int) -> Tensor:
        """[R, drafts] of each head's best choices [heads, R, choices]."""
        return best[self._heads[:drafts], :, self._picked[:drafts]].t()
