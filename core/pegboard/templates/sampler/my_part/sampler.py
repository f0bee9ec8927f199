"""All of `SamplingParams` in plain torch, and top-n-sigma (Tang et al., 2024): a set that does not depend on the
temperature, since it is cut by the spread of the logits.

Letters: N rows, V vocabulary, m most probable tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Self

import torch
from pegboard.contracts.sampler import (
    LogprobTensors,
    SampleOutput,
    Sampler,
    SamplerNeed,
    SampleRows,
    SlotOpening,
)
from pegboard.noise import gumbel
from torch import Tensor

from .options import Options


class Slot:
    """One request's parameters, and what it has chosen."""

    def __init__(self, opening: SlotOpening) -> None:
        self.sampling = opening.sampling
        self.stop_ids = list(opening.stop_ids)
        #: The noise takes 64-bit seeds as signed numbers.
        self.seed = (opening.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self.prompt = list(set(opening.prompt))
        self.output = list(opening.output)

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0 or self.sampling.top_k == 1 or self.sampling.top_p == 0

    def adjust(self, logits: Tensor) -> None:
        """Penalties, bias and min_tokens, in place on one row [V]."""
        sampling = self.sampling
        if sampling.repetition_penalty != 1:
            seen = list({*self.prompt, *self.output})
            old = logits[seen]
            logits[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, count in Counter(self.output).items():
                logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        if len(self.output) < sampling.min_tokens:
            logits[self.stop_ids] = -torch.inf


class MyPart(Sampler):
    """Everything in float64. The noise is that of `pegboard.noise`, so a seed gives the same tokens as elsewhere."""

    def __init__(self, options: Options) -> None:
        self._sigma = options.sigma
        self._slots: dict[int, Slot] = {}

    @classmethod
    def refusals(cls, need: SamplerNeed, options: Options) -> Sequence[str]:
        reasons = []
        if need.device.type != "cpu":
            reasons.append(f"looks at each chosen token on the host: runs on a CPU, not on {need.device.type}")
        if need.max_drafts:
            reasons.append("does not verify drafts")
        return reasons

    @classmethod
    def create(cls, need: SamplerNeed, options: Options) -> Self:
        return cls(options)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self._slots[opening.slot] = Slot(opening)

    def features(self, host_slots: Sequence[int]) -> frozenset[str]:
        return frozenset()  # for the choice of a captured graph, and this sampler is not capturable

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        slots = [self._slots[slot] for slot in rows.host_slots]
        adjusted = logits.to(torch.float64, copy=True)
        for row, slot in zip(adjusted, slots, strict=True):
            slot.adjust(row)
        scores = self._scores(adjusted, slots)
        seeds = torch.tensor([slot.seed for slot in slots])
        noise = gumbel(seeds, rows.positions, torch.arange(logits.shape[1]))
        ids = (scores + noise).argmax(-1)  # the first of equals
        ids = ids.masked_fill(adjusted.amax(-1) == -torch.inf, -2).masked_fill(logits.isnan().any(-1), -1)
        for slot, id in zip(slots, ids.tolist(), strict=True):
            if id >= 0:
                slot.output.append(id)
        return SampleOutput(ids=ids, logprobs=_logprobs_of_step(slots, logits, adjusted, scores, ids))

    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        return _logprobs(logits, targets, top)

    def _scores(self, logits: Tensor, slots: Sequence[Slot]) -> Tensor:
        """Logits [N, V] below the best one and divided by the temperature; -inf for what is dropped."""

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)[:, None]

        sampling = [slot.sampling for slot in slots]
        vocabulary = logits.shape[1]
        temperature = column([1.0 if slot.greedy else slot.sampling.temperature for slot in slots])
        top_k = column([1 if slot.greedy else slot.sampling.top_k or vocabulary for slot in slots])
        top_p = column([params.top_p for params in sampling])
        min_p = column([params.min_p for params in sampling])

        peak = logits.amax(-1, keepdim=True)
        scores = torch.where(logits == peak, 0.0, (logits - peak) / temperature)
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)  # ties by lower id
        kept = torch.arange(vocabulary) < top_k
        weights = ranked.exp() * kept
        mass = weights.cumsum(-1)
        kept &= (mass - weights < top_p * mass[:, -1:]) | (top_p >= 1)
        kept &= ranked.exp() >= min_p
        if self._sigma is not None:
            kept &= logits.gather(-1, order) >= peak - self._sigma * _spread(logits)
        kept[:, 0] = True
        return torch.full_like(scores, -torch.inf).scatter(-1, order, ranked.masked_fill(~kept, -torch.inf))


def _spread(logits: Tensor) -> Tensor:
    """Standard deviation of each row's finite logits, [N, 1]."""
    finite = logits.isfinite()
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    centred = (logits - logits.masked_fill(~finite, 0).sum(-1, keepdim=True) / count).masked_fill(~finite, 0)
    return (centred.square().sum(-1, keepdim=True) / count).sqrt()


def _logprobs_of_step(
    slots: Sequence[Slot], logits: Tensor, adjusted: Tensor, scores: Tensor, ids: Tensor
) -> LogprobTensors | None:
    """For the rows that ask: of the model's logits, or ("processed") of what the choice was made from."""
    wanted = [slot.sampling.logprobs for slot in slots if slot.sampling.logprobs is not None]
    if not wanted:
        return None
    source = logits.double()
    for row, slot in enumerate(slots):
        if slot.sampling.logprobs_mode == "processed":
            source[row] = adjusted[row] if slot.greedy else scores[row]
    return _logprobs(source, ids, max(wanted))


def _logprobs(logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
    """log_softmax of logits [N, V]: of targets [N] (NaN where negative), and the `top` best."""
    found = logits.double().log_softmax(-1)
    chosen = found.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(targets < 0, torch.nan)
    values, ids = found.sort(dim=-1, descending=True, stable=True)
    return LogprobTensors(chosen=chosen.float(), top_ids=ids[:, :top], top_values=values[:, :top].float())
