"""Rejection sampling of drafts (Leviathan et al. 2023, Chen et al. 2023): accept with probability min(1, p / q), else
choose from the residual max(p - q, 0). What comes out is distributed as p, wherever the draft came from.

Acceptance and residual have noise of their own, so that a draft that was drawn with the target's noise is as good as
any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.noise import ACCEPTANCE, RESIDUAL, gumbel, uniform

from .choice import Candidates, Draw


def choose_or_accept(candidates: Candidates, draw: Draw, drafts: Tensor, probs: Tensor | None) -> Tensor:
    """[M] int64: the draft where it is accepted, else another choice; plain choices where drafts [M] are negative.

    probs [M, V]: the distributions q that drafts were drawn from; None: each draft had probability 1."""
    weights = candidates.scores.exp()
    p = weights / weights.sum(-1, keepdim=True)
    proposed = candidates.ids == drafts[:, None]
    q = proposed.to(p.dtype) if probs is None else probs.gather(1, candidates.ids).to(p.dtype)
    there = (p * proposed).sum(-1)
    if probs is None:
        likely = torch.ones_like(there)
    else:
        likely = probs.gather(1, drafts.clamp(min=0)[:, None])[:, 0].to(p.dtype)
    accepted = uniform(draw.seeds, draw.positions, ACCEPTANCE) * likely < there
    residual = (p - q).clamp_(min=0)
    noisy = residual.log() + gumbel(draw.seeds, draw.positions, candidates.ids, RESIDUAL)
    best, place = noisy.max(-1)
    other = candidates.ids.gather(1, place[:, None])[:, 0]
    # Where p and q are alike to the last bit nothing is left: rounding alone can have refused the draft
    accepted |= best == -torch.inf
    return torch.where(drafts < 0, candidates.pick(draw), torch.where(accepted, drafts, other))
