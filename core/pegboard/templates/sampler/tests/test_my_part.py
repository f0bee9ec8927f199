from __future__ import annotations

import torch
from pegboard import SamplingParams
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed, SampleRows, SlotOpening
from pegboard.testing import SamplerSuite, isolated_engine

import my_part
from my_part.options import Options
from my_part.sampler import MyPart

LOGITS = torch.tensor([4.0, 3.5, 2.0, 0.0, 0.0, -1.0, -1.0, -9.0])


class TestMyPart(SamplerSuite):
    """The contract: every choice against the definition, noise included. Without `sigma`, which drops more."""

    part = my_part.pegboard_parts()[0]
    dtypes = ("float32", "bfloat16")
    claims = ("batch_invariant",)


def choices(sigma: float, temperature: float) -> set[int]:
    """What is chosen in 400 draws."""
    need = SamplerNeed(device=DeviceFacts(type="cpu"), vocab_size=len(LOGITS), slots=1, max_length=1000)
    sampler = MyPart.create(need, Options(sigma=sigma))
    sampling = SamplingParams(temperature=temperature)
    sampler.open([SlotOpening(slot=0, sampling=sampling, seed=5, prompt=(1,), max_length=1000)])
    found = set()
    for position in range(400):
        rows = SampleRows(slots=torch.tensor([0]), positions=torch.tensor([position]), host_slots=(0,))
        found.add(int(sampler.sample(LOGITS[None], rows).ids))
    return found


def test_sigma_keeps_what_is_near_the_best_at_any_temperature() -> None:
    spread = float(LOGITS.double().std(correction=0))
    near = {token for token, logit in enumerate(LOGITS.tolist()) if logit >= 4.0 - 0.6 * spread}
    assert near == {0, 1, 2}
    assert choices(0.6, temperature=1.0) == near
    assert choices(0.6, temperature=50.0) == near
    assert choices(9.0, temperature=50.0) == set(range(8))


def test_an_engine_uses_it(model: str) -> None:
    sampler = {"use": "my-part", "options": {"sigma": 0.0001}}
    with isolated_engine(model, plugins=[my_part], sampler=sampler) as engine:
        assert engine.plan.parts["sampler"].name == "my-part"
        prompts = [[5, 6, 7], list(range(3, 40))]
        hot = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=2.0, seed=1, ignore_eos=True))
        greedy = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [output.token_ids for output in hot] == [output.token_ids for output in greedy]  # nothing else is left
