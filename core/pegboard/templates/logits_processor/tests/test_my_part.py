from __future__ import annotations

import pytest
import torch
from pegboard import InvalidRequest, SamplingParams
from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.processor import ProcessorNeed, ProcessorOpening, ProcessRows
from pegboard.testing import ProcessorSuite, isolated_engine

import my_part
from my_part.options import Options
from my_part.processor import Arguments, MyPart

VOCABULARY = 12


class TestMyPart(ProcessorSuite):
    """The contract: rows don't feel each other, and what a slot does follows from its text alone."""

    part = my_part.pegboard_parts()[0]
    dtypes = ("float32", "float16", "bfloat16")
    examples = ({}, {"strength": 2.5}, {"window": 1}, {"strength": 0.5, "window": 3})
    wrong = ({"strength": 0}, {"window": 0}, {"strength": 11.0}, {"strenght": 1.0})


@pytest.mark.parametrize("strength", [0.5, 3.0])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("output", [[], [4], [4, 4, 7], [1, 2, 3, 1, 5, 8, 9, 2]])
def test_recent_tokens_lose_their_strength(strength: float, window: int, output: list[int]) -> None:
    need = ProcessorNeed(device=DeviceFacts(type="cpu"), vocab_size=VOCABULARY, slots=1, max_length=100)
    processor = MyPart.create(need, Options())
    processor.open(
        ProcessorOpening(slot=0, arguments=Arguments(strength=strength, window=window), prompt=(6,), output=())
    )
    for token in output:
        processor.accept(0, (token,))
    logits = torch.linspace(-1, 1, VOCABULARY)[None]
    found = logits.clone()
    processor.process(found, ProcessRows(slots=(0,)))
    recent = set(output[-window:])
    expected = [-strength if token in recent else 0.0 for token in range(VOCABULARY)]
    torch.testing.assert_close(found - logits, torch.tensor([expected]))


def test_an_engine_uses_it(model: str) -> None:
    greedy = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logit_bias": {9: 50.0, 11: 49.0, 13: 48.0}}
    asked = {"my-part": {"strength": 60.0, "window": 2}}
    chosen = [{"use": "my-part", "options": {"most": 100.0}}]
    with isolated_engine(model, plugins=[my_part], logits_processors=chosen) as engine:
        [plain] = engine.generate([[5, 6, 7]], SamplingParams(**greedy))
        [output] = engine.generate([[5, 6, 7]], SamplingParams(**greedy, processors=asked))
        with pytest.raises(InvalidRequest, match="at most 100"):
            engine.submit([5], SamplingParams(processors={"my-part": {"strength": 101.0}}))
    ids = output.token_ids
    assert len(set(plain.token_ids)) < 3
    assert all(len(set(ids[start : start + 3])) == 3 for start in range(len(ids) - 2))  # they take turns
