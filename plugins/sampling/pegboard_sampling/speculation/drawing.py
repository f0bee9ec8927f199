"""How a draft model chooses: with its target's temperature and noise, among its few most probable tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.contracts.sampler import SlotOpening
from pegboard.noise import gumbel

from ..slots import kind_of


class DraftDraws:
    """temperatures [slots] float64, 0 for greedy; seeds [slots] int64. Penalties, bias and limits of the request don't
    count: a draft that breaks them is refused."""

    def __init__(self, slots: int, candidates: int, wants_probs: bool, device: torch.device) -> None:
        self._candidates, self._wants_probs = candidates, wants_probs
        self._temperatures = torch.zeros(slots, dtype=torch.float64, device=device)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            greedy = kind_of(opening.sampling) == "greedy"
            self._temperatures[opening.slot] = 0.0 if greedy else opening.sampling.temperature
            self._seeds[opening.slot] = (opening.seed + (1 << 63)) % (1 << 64) - (1 << 63)

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids [R] for logits [R, V] at positions [R], and the distributions [R, V] that they were drawn from."""
        values, ids = logits.topk(min(self._candidates, logits.shape[1]))
        temperature = self._temperatures[slots][:, None]
        greedy = temperature == 0
        scores = (values - values[:, :1]).double() / temperature.masked_fill(greedy, 1.0)
        # The first of equals, as the target does
        scores = torch.where(greedy, torch.where(values == values[:, :1], -ids.double(), -torch.inf), scores)
        noise = gumbel(self._seeds[slots], positions, ids).masked_fill_(greedy, 0.0)
        place = (scores + noise).argmax(-1, keepdim=True)
        chosen = ids.gather(1, place)
        if not self._wants_probs:
            return chosen[:, 0], None
        shares = torch.where(greedy, (ids == chosen).double(), scores.softmax(-1))
        spread = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        return chosen[:, 0], spread.scatter_(1, ids, shares.float())
