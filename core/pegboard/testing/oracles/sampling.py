"""What a sampler must choose: the definition for one row, in float64.

Order: penalties, bias, min_tokens, temperature, top-k, top-p, min-p; then argmax(score + noise), the noise that of
`pegboard.noise`. Sets that depend on a sum (top-p, min-p) have an edge: what lies within `EDGE` of it may fall either
way, as may scores that differ by less than the sampler's arithmetic can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...contracts.sampler import SlotOpening
from ...noise import gumbel

EDGE = 1e-6


@dataclass(frozen=True)
class Choice:
    """One row's choice by the definition; all float64 [V]."""

    #: log of the probability relative to the most probable token; -inf for what may not be chosen.
    scores: Tensor
    #: scores and noise.
    noisy: Tensor
    #: Tokens that certainly take part, and those that may.
    certain: Tensor
    possible: Tensor

    @property
    def probabilities(self) -> Tensor:
        return self.scores.masked_fill(~self.certain, -torch.inf).softmax(-1)

    def problem(self, chosen: int, near: float) -> str:
        """Why `chosen` is wrong, or "". Scores within `near` of the best one may win."""
        best = int(self.noisy.masked_fill(~self.certain, -torch.inf).argmax())
        if not 0 <= chosen < self.noisy.shape[0]:
            return f"chose {chosen}, not {best}"
        if not self.possible[chosen]:
            return f"chose {chosen}, which may not be chosen; right is {best}"
        gap = float(self.noisy[best] - self.noisy[chosen])
        return "" if gap <= near else f"chose {chosen}, not {best}: its score is {gap:.3g} behind"


def is_greedy(opening: SlotOpening) -> bool:
    sampling = opening.sampling
    return sampling.temperature == 0 or sampling.top_k == 1 or sampling.top_p == 0


def adjust(logits: Tensor, opening: SlotOpening) -> Tensor:
    """logits [V] after penalties, bias and min_tokens: float64 [V]."""
    sampling, out = opening.sampling, logits.double().clone()
    counts = torch.zeros_like(out)
    for token in opening.output:
        counts[token] += 1
    seen = counts > 0
    seen[list(opening.prompt)] = True
    penalised = torch.where(out > 0, out / sampling.repetition_penalty, out * sampling.repetition_penalty)
    out = torch.where(seen, penalised, out)
    penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
    out = torch.where(counts > 0, out - penalty, out)
    for token, bias in sampling.logit_bias.items():
        out[token] += bias
    if len(opening.output) < sampling.min_tokens:
        out[list(opening.stop_ids)] = -torch.inf
    return out


def choose(logits: Tensor, opening: SlotOpening, position: int) -> Choice:
    """The choice from logits [V] for the slot's state at an absolute position."""
    sampling, z = opening.sampling, adjust(logits.cpu(), opening)
    if is_greedy(opening):
        first = torch.zeros_like(z, dtype=torch.bool)
        first[int(z.argmax())] = True
        scores = z - z.amax()
        # At most rounding of the adjustments may prefer another
        return Choice(scores=scores, noisy=scores, certain=first, possible=z > -torch.inf)
    scores = torch.where(z == z.amax(), 0.0, (z - z.amax()) / sampling.temperature)
    order = scores.sort(descending=True, stable=True).indices  # ties by lower id
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = scores[kept].exp()
    before = weights.cumsum(0) - weights
    mass = float(weights.sum())
    certain, possible = (torch.zeros_like(z, dtype=torch.bool) for _ in range(2))
    for mask, edge in ((certain, -EDGE), (possible, EDGE)):
        inside = weights >= sampling.min_p * (1 - edge)
        if sampling.top_p < 1:
            inside &= before < (sampling.top_p + edge) * mass
        mask[kept[inside]] = True
    certain[order[0]] = possible[order[0]] = True
    possible &= scores > -torch.inf
    certain &= possible
    scores = scores.masked_fill(~possible, -torch.inf)
    seed = (opening.seed + (1 << 63)) % (1 << 64) - (1 << 63)
    noise = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.arange(z.shape[0]))[0]
    return Choice(scores=scores, noisy=scores + noise, certain=certain, possible=possible)


def chi_square_limit(freedom: int) -> float:
    """The 99.99 % quantile by Wilson and Hilferty."""
    spread: float = 2 / (9 * freedom)
    limit: float = freedom * (1 - spread + 3.719 * spread**0.5) ** 3
    return limit
