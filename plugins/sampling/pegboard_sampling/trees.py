"""Trees of drafts: a row's queries are the last token, query 0, and drafts, each behind the query that is its parent
(Miao et al. 2024, SpecInfer). Several drafts may follow one query; those of one parent differ."""

from __future__ import annotations

import torch
from torch import Tensor


class DraftTree:
    """parents [N, W] int64: of each query, an earlier one of its row; what stands for query 0 and behind a row's last
    one is anything in 0 .. W-1."""

    def __init__(self, parents: Tensor) -> None:
        count, width = parents.shape
        self._parents = parents
        own = torch.eye(width, dtype=torch.bool, device=parents.device)
        seen = own.expand(count, -1, -1).clone()
        row = torch.arange(count, device=parents.device)
        for query in range(1, width):
            seen[:, query] |= seen[row, parents[:, query]]
        #: [N, W, W] bool: whether the second query lies on the way from the first token to the first query, itself too.
        self.ancestry = seen
        #: [N, W] int64: drafts on that way.
        self.depth = seen.sum(2) - 1

    def walk(self, drafts: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Follow what was chosen as long as it is a draft: ids [N, W] and the queries that they were chosen after, -1
        beyond. drafts [N, W] of the queries, negative where there is none; chosen [N, W] after each of them."""
        count, width = chosen.shape
        follows = torch.arange(width, device=chosen.device) > 0
        here = torch.zeros(count, 1, dtype=torch.int64, device=chosen.device)
        alive = torch.ones(count, 1, dtype=torch.bool, device=chosen.device)
        ids, path = [], []
        for _ in range(width):
            id = chosen.gather(1, here)
            ids.append(torch.where(alive, id, -1))
            path.append(torch.where(alive, here, -1))
            next = follows & (self._parents == here) & (drafts == id) & (drafts >= 0)
            alive &= next.any(1, keepdim=True)
            here = next.int().argmax(1, keepdim=True)
        return torch.cat(ids, 1), torch.cat(path, 1)
