"""Beams and logits processors on a GPU: the texts of a CPU, and rows that run ahead beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import SamplingParams
from pegboard.testing.tiny import tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "m", std=0.4, seed=5, head_dim=64, vocab_size=300)


@pytest.mark.supports("On a GPU", "beam search, the texts of a CPU")
def test_beams_are_those_of_a_cpu(path: Path, make_engine: Callable[..., Any]) -> None:
    """In float32, beside a request that runs ahead."""
    found = []
    for device in ("cpu", "cuda"):
        engine = make_engine(path, device=device, dtype="float32", max_rows=12, kv_memory="64MiB")
        other = engine.submit([7, 8], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        beams = [SamplingParams(num_beams=4, n=2, max_tokens=16, ignore_eos=True) for _ in range(2)]
        handles = [engine.submit([5 + index, 9, 13], sampling) for index, sampling in enumerate(beams)]
        outputs = [handle.result(timeout=120).raise_for_error() for handle in (*handles, other)]
        found.append([[completion.token_ids for completion in output.completions] for output in outputs])
    assert found[0] == found[1]


def test_structured_texts_beside_recorded_steps(path: Path, make_engine: Callable[..., Any]) -> None:
    pytest.importorskip("llguidance")
    settings = {"device": "cuda", "dtype": "bfloat16", "max_rows": 12, "kv_memory": "64MiB"}
    engine = make_engine(path, logits_processors=["structured"], **settings)
    free = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
    patterns = ["[0-9]{5}", "yes|no", "[a-f]{2,9}x"]
    for _ in range(3):
        handles = [
            engine.submit("x", SamplingParams(seed=2, max_tokens=40, processors={"structured": {"regex": pattern}}))
            for pattern in patterns
        ]
        other = engine.submit("hello", free)
        for pattern, handle in zip(patterns, handles, strict=True):
            assert re.fullmatch(pattern, handle.result(timeout=120).raise_for_error().text)
        assert len(other.result(timeout=120).raise_for_error().token_ids) == 40


@pytest.mark.supports("On a GPU", "structured output together with speculation")
@pytest.mark.parametrize("speculator", ["ngram", {"use": "ngram", "options": {"drafts": 2}}], ids=["many", "few"])
def test_structured_texts_that_speculate(path: Path, make_engine: Callable[..., Any], speculator: Any) -> None:
    """In float32 the texts are those of plain decoding, and some of their drafts are kept."""
    pytest.importorskip("llguidance")
    settings = {"device": "cuda", "dtype": "float32", "max_rows": 12, "kv_memory": "64MiB", "adapt_drafts": False}
    patterns = ["(abc ){20}", "[0-9]{40}", "(yes|no){12}", "[a-f]{2,30}x"]
    asked = [
        SamplingParams(seed=2, temperature=0.0 if index % 2 else 0.7, max_tokens=90, processors={"structured": one})
        for index, one in enumerate({"regex": pattern} for pattern in patterns)
    ]
    free = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    found = []
    for drafting in (None, speculator):
        engine = make_engine(path, logits_processors=["structured"], speculator=drafting, **settings)
        for _ in range(3):  # new shapes run plainly first, then they are recorded
            handles = [engine.submit("x", one) for one in asked] + [engine.submit("hello", free)]
            outputs = [handle.result(timeout=120).raise_for_error() for handle in handles]
            found.append([output.token_ids for output in outputs])
        stats = engine.stats().speculation
        for pattern, output in zip(patterns, outputs, strict=False):
            assert re.fullmatch(pattern, output.text)
    assert all(ids == found[0] for ids in found)
    assert sum(stats.accepted) > 3 * 30
