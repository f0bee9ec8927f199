"""Drafts that a sampler draws are those of the definition: the target's noise among the most probable tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pegboard import SamplingParams
from pegboard.contracts.sampler import SamplerNeed, SlotOpening
from pegboard.noise import gumbel
from pegboard.testing import SpeculatorSuite
from pegboard_sampling.speculation.drawing import DraftDraws, SampledDraws, TorchDraws, make_draws
from pegboard_sampling.torch_sampler import TorchSampler

CANDIDATES = 5
TEMPERATURES = (0.0, 0.7, 1.3)


def opened(draws: DraftDraws) -> DraftDraws:
    """With what a draft does not heed."""
    draws.open(
        [
            SlotOpening(
                slot=slot,
                sampling=SamplingParams(temperature=temperature, logit_bias={1: 9.0}, min_tokens=3, top_p=0.5),
                seed=(1 << 63) + slot,
                prompt=(3, 4),
                max_length=40,
            )
            for slot, temperature in enumerate(TEMPERATURES)
        ]
    )
    return draws


def expected(logits: Any, slots: list[int], positions: list[int]) -> list[int]:
    found = []
    for row, slot, position in zip(logits.double(), slots, positions, strict=True):
        best = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))[:CANDIDATES]
        if not TEMPERATURES[slot]:
            found.append(best[0])
            continue
        seed, ids = (1 << 63) + slot - (1 << 64), torch.tensor(best)
        noise = gumbel(torch.tensor([seed]), torch.tensor([position]), ids)[0]
        found.append(best[int((row[ids] / TEMPERATURES[slot] + noise).argmax())])
    return found


def samples(draws: DraftDraws, device: str = "cpu") -> None:
    logits = torch.randn(60, 64, generator=torch.Generator().manual_seed(0))
    logits[4] = logits[3]
    slots = [index % 3 for index in range(60)]
    positions = [5 + index // 2 for index in range(60)]
    asked = (torch.tensor(slots, device=device), torch.tensor(positions, device=device))
    ids, probs = opened(draws).choose(logits.to(device), *asked)
    assert probs is None
    assert ids.tolist() == expected(logits, slots, positions)
    assert len(set(ids.tolist())) > 20


def sampled(device: Any, vocab_size: int = 64) -> SampledDraws:
    need = SamplerNeed(device=device, vocab_size=vocab_size, slots=4, max_length=40)
    return SampledDraws(TorchSampler(need), 3, CANDIDATES)


@pytest.mark.parametrize("kind", ["torch", "sampler"])
def test_draws_are_those_of_the_definition(kind: str) -> None:
    device = SpeculatorSuite.need().device
    samples(sampled(device) if kind == "sampler" else TorchDraws(3, CANDIDATES, False, torch.device("cpu")))


def test_what_has_no_number_gives_a_token() -> None:
    draws = opened(sampled(SpeculatorSuite.need().device))
    ids, _ = draws.choose(torch.full((1, 64), float("nan")), torch.tensor([1]), torch.tensor([8]))
    assert 0 <= int(ids) < 64


def test_distributions_are_those_of_torch() -> None:
    draws = make_draws(SpeculatorSuite.need(wants_probs=True), SpeculatorSuite.need().device, torch.float32, 5)
    assert isinstance(draws, TorchDraws)


@pytest.mark.gpu
def test_the_fused_sampler_draws_on_cuda() -> None:
    class Suite(SpeculatorSuite):
        device = "cuda"

    need = Suite.need()
    draws = make_draws(need, need.device, torch.float32, CANDIDATES)
    assert isinstance(draws, SampledDraws)
    samples(draws, "cuda")
    assert isinstance(make_draws(need, need.device, torch.float64, CANDIDATES), TorchDraws)
    assert isinstance(make_draws(need, need.device, torch.float32, 65), TorchDraws)
