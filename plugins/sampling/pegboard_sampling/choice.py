"""From logits to a choice: the candidates that may be chosen, their scores, and the noise that decides.

A score is (logit - greatest logit) / temperature in float64: subtracting a constant changes no choice, and the
greatest score is 0, so that exp(score) is a probability relative to the most probable token. +inf logits take all
the mass, in equal shares. Rows whose greatest logit is NaN or -inf give arbitrary valid ids; the caller drops them.

Letters: M choices, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pegboard.noise import GUMBEL_MAX, gumbel

#: Noise computed at a time. On a CPU the temporaries then stay in the cache.
BLOCK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 22}
#: On a CPU, where fewer than this share of the tokens can still win, only those are looked at.
SPARSE = 0.25
#: Tokens of each row whose noise is looked at first, to rule out others.
FEW_BEST = 16
#: Candidates that top-p looks at first on a CPU.
FIRST_CANDIDATES = 256


@dataclass(frozen=True)
class Draw:
    """Parameters of M choices: `peak` [M, 1] the greatest logit, the others [M, 1] but for seeds and positions [M]."""

    peak: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def scores(self, logits: Tensor) -> Tensor:
        """Float64 scores of logits [M, C]."""
        logits = logits.double()
        return ((logits - self.peak) / self.temperature).masked_fill_(logits == self.peak, 0)


@dataclass(frozen=True)
class Candidates:
    """What may be chosen: scores [M, C] float64, -inf for what was dropped, of ids [M, C]."""

    scores: Tensor
    ids: Tensor

    def pick(self, draw: Draw) -> Tensor:
        """[M] int64"""
        noisy = self.scores + gumbel(draw.seeds, draw.positions, self.ids)
        best = noisy.amax(-1, keepdim=True)
        # Of equals the lowest id; a NaN row equals nothing
        return self.ids.masked_fill(noisy != best, torch.iinfo(torch.int64).max).amin(-1)


def best_first(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of each row of x [M, V], best first, ties by lower index: values and indices [M, k].

    torch.topk takes any of those that tie with the k-th, and puts equals in any order."""
    width = x.shape[1]
    if k >= width:
        return x.sort(dim=-1, descending=True, stable=True)
    if k == 0:
        return x[:, :0], torch.empty(x.shape[0], 0, dtype=torch.int64, device=x.device)
    values, ids = x.topk(k)
    last = values[:, -1:]
    certain = (values != last).sum(-1, keepdim=True)
    column = torch.arange(width, dtype=torch.int32, device=x.device)
    tied = torch.where(x == last, column, width).topk(k, largest=False).values.long()
    rank = torch.arange(k, device=x.device)
    ids = torch.where(rank < certain, ids, tied.gather(1, (rank - certain).clamp(min=0)))
    ids = ids.clamp(max=width - 1).sort(dim=-1).values  # the clamp: NaN equals nothing
    values, order = x.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def top_k_candidates(logits: Tensor, draw: Draw, top_k: Tensor, greatest_k: int) -> Candidates:
    """Exactly top_k [M, 1] of logits [M, V], then top-p on what is left, renormalised, then min-p."""
    values, ids = best_first(logits, greatest_k)
    scores = draw.scores(values)
    scores.masked_fill_(torch.arange(scores.shape[1], device=ids.device) >= top_k, -torch.inf)
    weights = scores.exp()
    return _drop(scores, weights, weights.cumsum(-1)[:, -1:], ids, draw)


def top_p_candidates(logits: Tensor, draw: Draw) -> Candidates:
    """The smallest sets whose mass reaches top_p, then min-p, for logits [M, V].

    On a CPU the best few are looked at first and more only when they don't reach the mass; elsewhere the host would
    have to wait for that, so everything is sorted."""
    # cumsum adds in one order whatever the number of rows; sum does not
    weights = draw.scores(logits).exp_()
    total = torch.cumsum(weights, -1, out=weights)[:, -1:].clone()
    width = logits.shape[1]
    count = min(FIRST_CANDIDATES, width) if logits.device.type == "cpu" else width
    while True:
        values, ids = best_first(logits, count)
        scores = draw.scores(values)
        weights = scores.exp()
        if count == width or bool((weights.cumsum(-1)[:, -1:] >= draw.top_p * total).all()):
            return _drop(scores, weights, total, ids, draw)
        count = min(8 * count, width)


def all_candidates(logits: Tensor, draw: Draw) -> Candidates:
    """Every token of logits [M, V] that min-p leaves."""
    scores = draw.scores(logits)
    scores.masked_fill_(scores.exp() < draw.min_p, -torch.inf)
    return Candidates(scores, torch.arange(logits.shape[1], device=logits.device).expand_as(scores))


def pick_from_all(logits: Tensor, draw: Draw) -> Tensor:
    """all_candidates(logits, draw).pick(draw) in little memory, and on a CPU without noise for those that can't win."""
    if logits.device.type == "cpu":
        possible = logits >= _floor(logits, draw)
        if int(possible.sum()) < SPARSE * possible.numel():
            return _pick_from_pairs(logits, draw, *possible.nonzero(as_tuple=True))
    return _pick_in_blocks(logits, draw)


def _drop(scores: Tensor, weights: Tensor, total: Tensor, ids: Tensor, draw: Draw) -> Candidates:
    """top-p and min-p on candidates that are sorted best first; `total` [M, 1] is the mass of all."""
    before = torch.cat([torch.zeros_like(total), weights.cumsum(-1)[:, :-1]], dim=-1)
    dropped = (before >= draw.top_p * total) & (draw.top_p < 1)
    return Candidates(scores.masked_fill(dropped | (weights < draw.min_p), -torch.inf), ids)


def _floor(logits: Tensor, draw: Draw) -> Tensor:
    """[M, 1]: what a logit must reach to be able to win. Never more than that: rounding errs downwards."""
    values, few = logits.topk(min(FEW_BEST, logits.shape[1]))
    known = draw.scores(values)
    known.masked_fill_(known.exp() < draw.min_p, -torch.inf)
    reached = (known + gumbel(draw.seeds, draw.positions, few)).amax(-1, keepdim=True)
    spread = torch.minimum(GUMBEL_MAX - reached, -draw.min_p.log() + 1e-6)
    floor = draw.peak - spread * draw.temperature
    work = torch.promote_types(logits.dtype, torch.float32)
    return torch.nextafter(floor.to(work), torch.full_like(floor, -torch.inf, dtype=work))


def _pick_from_pairs(logits: Tensor, draw: Draw, rows: Tensor, ids: Tensor) -> Tensor:
    """Choices among the given (row, id) pairs."""
    noisy = torch.empty(rows.shape[0], dtype=torch.float64)
    step = BLOCK_ELEMENTS["cpu"]
    for start in range(0, rows.shape[0], step):
        row, id = rows[start : start + step], ids[start : start + step]
        pairs = Draw(
            peak=draw.peak[row],
            temperature=draw.temperature[row],
            top_p=draw.top_p[row],
            min_p=draw.min_p[row],
            seeds=draw.seeds[row],
            positions=draw.positions[row],
        )
        score = pairs.scores(logits[row, id][:, None])
        score.masked_fill_(score.exp() < pairs.min_p, -torch.inf)
        noisy[start : start + step] = (score + gumbel(pairs.seeds, pairs.positions, id[:, None]))[:, 0]
    best = torch.full(logits.shape[:1], -torch.inf, dtype=torch.float64).scatter_reduce_(0, rows, noisy, "amax")
    ids = ids.masked_fill(noisy != best[rows], logits.shape[1] - 1)
    return torch.full(logits.shape[:1], logits.shape[1] - 1).scatter_reduce_(0, rows, ids, "amin")


def _pick_in_blocks(logits: Tensor, draw: Draw) -> Tensor:
    rows, width = logits.shape
    best = torch.full((rows,), -torch.inf, dtype=torch.float64, device=logits.device)
    chosen = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    step = max(1, BLOCK_ELEMENTS[logits.device.type] // max(1, rows))
    for start in range(0, width, step):
        part = all_candidates(logits[:, start : start + step], draw).scores
        ids = torch.arange(start, start + part.shape[1], device=logits.device)
        values, index = (part + gumbel(draw.seeds, draw.positions, ids)).max(-1)
        chosen = torch.where(values > best, index + start, chosen)
        best = best.maximum(values)
    return chosen
