from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pegboard import Request, SamplingParams
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import DraftContext
from pegboard.testing import SpeculatorSuite, isolated_engine

import my_part
from my_part.options import Options
from my_part.speculator import MyPart


def followers(history: Sequence[int], drafts: int) -> list[int]:
    """By the definition: from the last token on, each time to what followed the latest equal one."""
    found: list[int] = []
    token = history[-1]
    while len(found) < drafts:
        places = [place for place in range(len(history) - 1) if history[place] == token]
        if not places:
            break
        token = history[places[-1] + 1]
        found.append(token)
    return found


class TestMyPart(SpeculatorSuite):
    """The contract: drafts follow from a slot's own text, and never leave the vocabulary."""

    part = my_part.pegboard_parts()[0]

    def reference(self, history: Sequence[int], drafts: int) -> list[int]:
        return followers(history, drafts)


@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("text", [[5], [5, 6], [5, 6, 5], [1, 2, 3, 1, 4, 2, 1], [7, 7, 7], [0, 63, 0, 62, 63, 0]])
def test_tokens_that_are_told_one_by_one_count_as_those_of_a_prompt(text: list[int], drafts: int) -> None:
    speculator = MyPart.create(SpeculatorSuite.need(), Options())
    begin = SlotOpening(slot=2, sampling=SamplingParams(), seed=0, prompt=(text[0],), max_length=96)
    speculator.open([begin])
    slot = torch.tensor([2])
    for token in text[1:]:
        speculator.observe(slot, torch.tensor([[token, -1, -1]]), torch.tensor([1]))
    context = DraftContext(
        slots=slot,
        last_ids=torch.tensor([text[-1]]),
        positions=torch.tensor([len(text) - 1]),
        taps=(),
        batch=None,
        drafts=drafts,
    )
    found = [token for token in speculator.propose(context).ids[0].tolist() if token >= 0]
    assert found == followers(text, drafts)


def test_an_engine_uses_it(model: str) -> None:
    """The text is that of an engine without drafts, in fewer steps."""
    cycle = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logit_bias={9: 60.0})
    free = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    texts = {}
    for name, settings in {"plain": {}, "drafts": {"speculator": "my-part", "adapt_drafts": False}}.items():
        with isolated_engine(model, plugins=[my_part], **settings) as engine:
            outputs = engine.generate([Request(prompt=[5, 6, 7], sampling=sampling) for sampling in (cycle, free)])
            texts[name] = [output.token_ids for output in outputs]
            stats = engine.stats().speculation
    assert texts["plain"] == texts["drafts"]
    assert stats is not None
    assert sum(stats.accepted) > 20
