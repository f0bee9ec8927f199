"""How a draft model chooses: with its target's temperature and noise, among its few most probable tokens.

Penalties, bias and limits of the request don't count: a draft that breaks them is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import Sampler, SamplerNeed, SampleRows, SamplingParams, SlotOpening
from pegboard.contracts.speculator import SpeculatorNeed
from pegboard.devices import torch_device
from pegboard.noise import gumbel

from ..slots import kind_of


class DraftDraws(ABC):
    @abstractmethod
    def open(self, openings: Sequence[SlotOpening]) -> None: ...

    @abstractmethod
    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids [R] for logits [R, V] at positions [R], and, where they are wanted, the distributions [R, V] that they
        were drawn from."""


def make_draws(need: SpeculatorNeed, device: DeviceFacts, dtype: torch.dtype, candidates: int) -> DraftDraws:
    """On `device`, for logits of `dtype`."""
    if device.type == "cuda" and not need.wants_probs and find_spec("triton") is not None:
        from ..fused.best import MOST
        from ..fused.sampler import FusedSampler

        wanted = SamplerNeed(
            device=device,
            vocab_size=need.target.vocab_size,
            slots=need.slots + 1,
            max_length=need.max_length,
            dtype=str(dtype).removeprefix("torch."),
        )
        if candidates <= MOST.value and not FusedSampler.refusals(wanted, None):
            return SampledDraws(FusedSampler.create(wanted, None), need.slots, candidates)
    return TorchDraws(need.slots, candidates, need.wants_probs, torch.device(torch_device(device)))


class TorchDraws(DraftDraws):
    """temperatures [slots] float64, 0 for greedy; seeds [slots] int64."""

    def __init__(self, slots: int, candidates: int, wants_probs: bool, device: torch.device) -> None:
        self._candidates, self._wants_probs = candidates, wants_probs
        self._temperatures = torch.zeros(slots, dtype=torch.float64, device=device)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self._temperatures[opening.slot] = _temperature(opening)
            self._seeds[opening.slot] = (opening.seed + (1 << 63)) % (1 << 64) - (1 << 63)

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        ids, values, scores, noise, greedy = self._perturbed(logits, slots, positions)
        # The first of equals, as the target does
        scores = torch.where(greedy, torch.where(values == values[:, :1], -ids.double(), -torch.inf), scores)
        place = (scores + noise).argmax(-1, keepdim=True)
        chosen = ids.gather(1, place)
        if not self._wants_probs:
            return chosen[:, 0], None
        shares = torch.where(greedy, (ids == chosen).double(), scores.softmax(-1))
        spread = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        return chosen[:, 0], spread.scatter_(1, ids, shares.float())

    def best(self, logits: Tensor, slots: Tensor, positions: Tensor, count: int) -> Tensor:
        """[R, count] different ids, the one that `choose` gives first but for equal logits."""
        ids, _, scores, noise, _ = self._perturbed(logits, slots, positions)
        return ids.gather(1, (scores + noise).topk(count).indices)

    def _perturbed(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Of the candidates ids, logits, scores and noise [R, c]; which rows are greedy [R, 1]: they have no noise."""
        values, ids = logits.topk(min(self._candidates, logits.shape[1]))
        temperature = self._temperatures[slots][:, None]
        greedy = temperature == 0
        scores = (values - values[:, :1]).double() / temperature.masked_fill(greedy, 1.0)
        noise = gumbel(self._seeds[slots], positions, ids).masked_fill_(greedy, 0.0)
        return ids, values, scores, noise, greedy


class SampledDraws(DraftDraws):
    """By a sampler of slots + 1 slots for which the candidates are a top-k: a few launches in place of two hundred,
    most of which are the noise's. The last slot stands for all of them in what the sampler chooses its code by."""

    def __init__(self, sampler: Sampler, slots: int, candidates: int) -> None:
        self._sampler, self._candidates, self._last = sampler, candidates, slots
        stand_in = SlotOpening(slot=slots, sampling=self._sampling(1.0), seed=0, prompt=(), max_length=1)
        sampler.open([stand_in])
        self._key = sampler.graph_key((slots,))

    def open(self, openings: Sequence[SlotOpening]) -> None:
        self._sampler.open(
            [
                SlotOpening(
                    slot=opening.slot,
                    sampling=self._sampling(_temperature(opening)),
                    seed=opening.seed,
                    prompt=(),
                    max_length=opening.max_length,
                )
                for opening in openings
            ]
        )

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, None]:
        rows = SampleRows(slots=slots, positions=positions, host_slots=(self._last,) * len(slots), key=self._key)
        # NaN gives no token, and the next draft must have one before it
        return self._sampler.sample(logits, rows).ids.clamp(min=0), None

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, top_k=self._candidates)


def _temperature(opening: SlotOpening) -> float:
    return 0.0 if kind_of(opening.sampling) == "greedy" else opening.sampling.temperature
