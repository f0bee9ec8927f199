"""What is chosen from: rows of logits, their slots and positions, and what came before in rows with drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Choices(NamedTuple):
    """[M] each, int64. With drafts the queries that choices follow (in `trees` with their parents), how many drafts of
    its row each follows, and in chains the draft that it judges, -1 for none; what those were drawn from stands in
    `probs` [M, V], one row later."""

    logits: Tensor
    slots: Tensor
    positions: Tensor
    queries: Tensor | None = None
    places: Tensor | None = None
    drafts: Tensor | None = None
    probs: Tensor | None = None
    trees: bool = False

    def parts(self, most: int) -> Iterator[tuple[slice, Choices]]:
        for start in range(0, self.logits.shape[0], most):
            part = slice(start, start + most)
            yield (
                part,
                Choices(
                    logits=self.logits[part],
                    slots=self.slots[part],
                    positions=self.positions[part],
                    # What comes before or after may lie in another part
                    queries=None if self.queries is None else self.queries[start:],
                    places=None if self.places is None else self.places[part],
                    drafts=None if self.drafts is None else self.drafts[part],
                    probs=None if self.probs is None else self.probs[start:],
                    trees=self.trees,
                ),
            )
