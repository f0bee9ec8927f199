"""Rejection sampling of drafts: what comes out is distributed as without drafts, wherever they came from."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard import Engine, PegboardError, Request, SamplingParams
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed, SampleRows, SlotOpening, VerifyRows
from pegboard.testing.tiny import tiny_model
from pegboard_sampling.options import TorchSamplerOptions
from pegboard_sampling.torch_sampler import TorchSampler

FULL = bool(os.environ.get("PEGBOARD_FULL"))
VOCABULARY = 12
#: Of the target after the last token, and after any draft; and what drafts are drawn from.
FIRST = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -1.0, -2.0, -3.0, 1.2])
SECOND = FIRST.flip(0) * 0.7
DRAFT = torch.tensor([0.3, 0.0, 0.1, 0.0, 0.3, 0.0, 0.0, 0.2, 0.0, 0.05, 0.05, 0.0])


def made(draws: int, rejection: bool = True, **kw: Any) -> TorchSampler:
    need = SamplerNeed(device=DeviceFacts(type="cpu"), vocab_size=VOCABULARY, slots=draws, max_length=100, max_drafts=1)
    options = TorchSamplerOptions(verification="rejection" if rejection else "coupled")
    sampler = TorchSampler.create(need, options)
    sampling = SamplingParams(**kw)
    sampler.open(
        [
            SlotOpening(slot=slot, sampling=sampling, seed=1000 + slot, prompt=(3,), max_length=100)
            for slot in range(draws)
        ]
    )
    return sampler


def verify_rows(drafts: Tensor, probs: Tensor | None) -> VerifyRows:
    count = drafts.shape[0]
    return VerifyRows(
        slots=torch.arange(count),
        query_start=torch.arange(0, 2 * count + 1, 2, dtype=torch.int32),
        positions=torch.full((count,), 7),
        ids=torch.stack((torch.full_like(drafts, 3), drafts), 1).flatten(),
        parents=None,
        probs=probs,
        host_slots=tuple(range(count)),
        host_queries=(2,) * count,
    )


def expected(logits: Tensor, **kw: Any) -> Tensor:
    """By the definition, for top-k and temperature."""
    scores = logits.double() / kw.get("temperature", 1.0)
    top = kw.get("top_k", 0)
    if top:
        scores[scores.argsort(descending=True, stable=True)[top:]] = -torch.inf
    return scores.softmax(-1)


def plausible(statistic: float, freedom: int) -> bool:
    """Whether chi-square is that small but once in a thousand times (Wilson and Hilferty 1931)."""
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3


def drawn_from(p: Tensor, found: Tensor) -> bool:
    counts = found.bincount(minlength=VOCABULARY).double()
    assert counts[p == 0].sum() == 0
    wanted = p * counts.sum()
    terms = ((counts - wanted) ** 2 / wanted)[p > 0]
    return plausible(float(terms.sum()), len(terms) - 1)


@pytest.mark.parametrize("drawn", ["with probs", "from nothing", "with the target's noise"])
@pytest.mark.parametrize("kw", [{}, {"temperature": 0.6}, {"top_k": 4}], ids=str)
def test_frequencies_are_those_of_the_target(kw: dict[str, Any], drawn: str) -> None:
    """`drawn`: from q with q known; all the same, as if sure; or by the same Gumbel noise that plain choices use."""
    draws = 100_000 if FULL else 8_000
    sampler = made(draws, **kw)
    generator = torch.Generator().manual_seed(5)
    probs = None
    if drawn == "with probs":
        drafts = DRAFT.multinomial(draws, replacement=True, generator=generator)
        probs = DRAFT.expand(2 * draws, -1)
    elif drawn == "from nothing":
        drafts = torch.full((draws,), 2)
    else:
        rows = SampleRows(slots=torch.arange(draws), positions=torch.full((draws,), 7), host_slots=tuple(range(draws)))
        drafts = made(draws).sample(DRAFT.log().expand(draws, -1), rows).ids
        probs = DRAFT.expand(2 * draws, -1)
    out = sampler.verify(torch.stack((FIRST, SECOND)).repeat(draws, 1), verify_rows(drafts, probs))
    assert drawn_from(expected(FIRST, **kw), out.ids[:, 0])
    both = out.count == 2
    assert torch.equal(both, out.ids[:, 0] == drafts) or probs is not None
    assert drawn_from(expected(SECOND, **kw), out.ids[both, 1])
    assert not drawn_from(expected(FIRST, temperature=1.2), out.ids[:, 0])  # the test can fail


def test_accepts_as_often_as_can_be() -> None:
    """The overlap of p and q, which coupled verification does not reach."""
    draws = 8_000
    drafts = DRAFT.multinomial(draws, replacement=True, generator=torch.Generator().manual_seed(1))
    rows = verify_rows(drafts, DRAFT.expand(2 * draws, -1))
    out = made(draws).verify(torch.stack((FIRST, SECOND)).repeat(draws, 1), rows)
    overlap = float(torch.minimum(expected(FIRST), DRAFT.double()).sum())
    assert float((out.count == 2).double().mean()) == pytest.approx(overlap, abs=0.03)


def test_equal_distributions_are_always_accepted() -> None:
    p = FIRST.softmax(-1)
    drafts = p.multinomial(2_000, replacement=True, generator=torch.Generator().manual_seed(2))
    logits = torch.stack((FIRST, SECOND)).repeat(2_000, 1)
    out = made(2_000).verify(logits, verify_rows(drafts, p.expand(4_000, -1)))
    assert float((out.count == 2).double().mean()) > 0.999


def test_greedy_rows_keep_what_is_best() -> None:
    drafts = torch.tensor([0, 1, 2, 11])
    out = made(4, temperature=0.0).verify(torch.stack((FIRST, SECOND)).repeat(4, 1), verify_rows(drafts, None))
    assert out.ids.tolist() == [[0, int(SECOND.argmax())], [0, -1], [0, -1], [0, -1]]


def test_probs_are_wanted_by_rejection_alone() -> None:
    assert not TorchSampler.wants_probs(TorchSamplerOptions())
    assert TorchSampler.wants_probs(TorchSamplerOptions(verification="rejection"))
    with pytest.raises(PegboardError, match="probs"):
        made(1, rejection=False).verify(
            torch.stack((FIRST, SECOND)), verify_rows(torch.tensor([1]), DRAFT.expand(2, -1))
        )


@pytest.mark.supports("Decoding", "speculative decoding, verified by rejection sampling: the same distribution")
def test_through_an_engine(tmp_path: Path) -> None:
    """Sequences of three tokens, plain and with n-grams that are right now and then, by a two-sample chi-square."""
    model = tiny_model(tmp_path / "model", vocab_size=16, std=0.15, tokenizer=False)
    draws, found = 50_000 if FULL else 1_500, []
    for settings in ({}, {"speculator": {"use": "ngram", "options": {"drafts": 2, "min_n": 1}}}):
        sampler = {"use": "torch", "options": {"verification": "rejection"}}
        with Engine(model, device="cpu", max_rows=64, sampler=sampler, max_queue=64, **settings) as engine:  # type: ignore[arg-type]
            prompt = [5, 6, 7, 8, 9, 5, 6, 7, 8, 5, 6]
            counts: Counter[tuple[int, ...]] = Counter()
            asked = [SamplingParams(seed=seed, max_tokens=3, ignore_eos=True, top_k=3) for seed in range(draws)]
            for output in engine.generate([Request(prompt=prompt, sampling=sampling) for sampling in asked]):
                counts[output.raise_for_error().token_ids] += 1
            found.append(counts)
    plain, drafted = found
    assert sum(plain.values()) == sum(drafted.values()) == draws
    kinds = [kind for kind in plain | drafted if plain[kind] + drafted[kind] >= 20]
    assert len(kinds) >= 8
    terms = [(plain[kind] - drafted[kind]) ** 2 / (plain[kind] + drafted[kind]) for kind in kinds]
    assert plausible(sum(terms), len(kinds))
    assert plain != drafted  # other noise has decided
