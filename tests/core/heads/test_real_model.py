"""Heads beside SmolLM2: the tokens of plain decoding, with random heads and with trained ones, which propose well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.heads import HeadsSettings, train_heads

MODEL = "smollm2-135m-instruct"
PROMPTS = ("What is the capital of France?", "Count from one to ten.", "Why do leaves fall in autumn?")

pytestmark = [pytest.mark.model, pytest.mark.full]


def answers(**settings: Any) -> tuple[list[tuple[int, ...]], Any]:
    with Engine(MODEL, device="cpu", max_length=256, adapt_drafts=False, **settings) as engine:
        handles = [
            engine.submit(
                engine.chat_request([{"role": "user", "content": prompt}]),
                SamplingParams(temperature=temperature, seed=index, max_tokens=40),
            )
            for temperature in (0.0, 0.7)
            for index, prompt in enumerate(PROMPTS)
        ]
        found = [handle.result().raise_for_error().token_ids for handle in handles]
        return found, engine.stats().speculation


@pytest.mark.parametrize("epochs", [0, 4], ids=["untrained", "trained"])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_the_same_tokens_as_without(tmp_path: Path, kind: str, epochs: int) -> None:
    settings = HeadsSettings(drafts=2, texts=40, tokens=32, epochs=max(epochs, 1), rate=2e-3 if epochs else 0.0)
    report = train_heads(MODEL, tmp_path / "heads", kind=kind, settings=settings, device="cpu")
    expected, _ = answers()
    found, speculation = answers(speculator={"use": kind, "options": {"model": str(tmp_path / "heads")}})
    assert found == expected
    assert sum(speculation.proposed) > 50
    if epochs:
        assert report.after.mean_length > report.before.mean_length + 0.03
