"""The heads that the repository holds for the real model load, change no token, and are right as often as is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard import Engine, SamplingParams

MODEL = "smollm2-135m-instruct"
HEADS = Path(__file__).parents[3] / "heads"
PROMPTS = ("Tell me about rivers.", "Write a short story about a lighthouse.")


@pytest.mark.model
@pytest.mark.supports("Decoding", "draft heads trained for SmolLM2-135M-Instruct, in the repository")
@pytest.mark.parametrize(("kind", "least"), [("eagle", 1.6), ("medusa", 1.25)])
def test_the_published_heads(kind: str, least: float) -> None:
    options = {"model": str(HEADS / f"{MODEL}-{kind}"), "drafts": 3}
    answers = []
    for settings in ({}, {"speculator": {"use": kind, "options": options}, "adapt_drafts": False}):
        with Engine(MODEL, device="cpu", max_length=128, **settings) as engine:  # type: ignore[arg-type]
            requests = [engine.chat_request([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
            handles = [engine.submit(one, SamplingParams(temperature=0.0, max_tokens=40)) for one in requests]
            answers.append([handle.result().raise_for_error().token_ids for handle in handles])
            found = engine.stats().speculation
    assert answers[0] == answers[1]
    assert found is not None
    assert found.mean_length is not None
    assert found.mean_length > least
