"""The real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegboard import Engine, SamplingParams

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
#: Greedy, float32, for the chat message "Count from 1 to 20.", made with an independent implementation.
COUNTING = "33 30 216 33 198 34 30 216 34 198 35 30 216 35 198 36 30 216 36 198 37 30 216 37 198 38 30 216 38 198 39 30"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, device="cpu", max_rows=8, max_length=1024) as engine:
        yield engine


@pytest.mark.supports("Models", "SmolLM2-135M-Instruct")
@pytest.mark.supports("Files", "GGUF, dequantised on load")
def test_counting_gives_the_reference_ids(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    output = engine.chat([{"role": "user", "content": "Count from 1 to 20."}], sampling)
    assert output.token_ids == tuple(int(i) for i in COUNTING.split())
    assert output.finish_reason == "length"
    assert output.text.startswith("1. 1\n2. 2\n3. 3\n")


def test_answer_ends_with_the_end_of_turn(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    output = engine.chat([{"role": "user", "content": "What is the capital of France?"}], sampling)
    assert output.token_ids == (504, 3575, 282, 4649, 314, 7042, 30, 2)
    assert output.finish_reason == "stop"
    assert output.text == "The capital of France is Paris."


def test_beside_others_and_streamed(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    others = [engine.submit(f"Story number {i}:", SamplingParams(seed=i, max_tokens=24)) for i in range(4)]
    deltas = list(engine.stream_chat([{"role": "user", "content": "Count from 1 to 20."}], sampling))
    assert tuple(token for delta in deltas for token in delta.token_ids) == tuple(int(i) for i in COUNTING.split())
    assert len([delta for delta in deltas if delta.text]) > 10
    assert all(handle.result(timeout=60).error is None for handle in others)


def test_second_turn_reuses_the_first(engine: Engine, make_engine: Callable[..., Any]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=16)
    talk = [{"role": "user", "content": "Tell me about the river Rhine and the towns that lie along it, please."}]
    first = engine.chat(talk, sampling)
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the Danube?"}]
    second = engine.chat(talk, sampling)
    assert second.metrics.cached_tokens >= 32


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, pytest.param({"temperature": 0.7, "seed": 11, "top_p": 0.9}, marks=pytest.mark.full)],
    ids=str,
)
def test_speculation_changes_no_token(
    engine: Engine, make_engine: Callable[..., Any], sampling: dict[str, Any]
) -> None:
    """N-grams, and a draft model (the model itself: nearly always right)."""
    talk = [{"role": "user", "content": "Repeat this: seven brown foxes jump over seven lazy dogs, twice."}]
    wanted = SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1.05, **sampling)
    expected = engine.chat(talk, wanted)
    draft = {"use": "draft_model", "options": {"model": MODEL, "drafts": 3}}
    for speculator in ("ngram", draft):
        made = make_engine(MODEL, device="cpu", max_rows=2, max_length=256, speculator=speculator, adapt_drafts=False)
        found = made.chat(talk, wanted)
        assert found.token_ids == expected.token_ids
        assert found.text == expected.text
        assert made.stats().speculation.mean_length > 1.2
