"""Speculation on a CUDA device: the tokens of plain decoding, from recorded steps, without waiting for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine, SamplingParams
from pegboard.runner.recording import Recordings
from pegboard.runner.step_shape import StepShape
from pegboard.testing.tiny import tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "model", tokenizer=False)


def tokens(model: Path, **settings: Any) -> list[tuple[int, ...]]:
    with Engine(model, device="cuda", dtype="float32", max_rows=8, **settings) as engine:
        handles = [
            engine.submit(
                [5, 6, 7, 5, 6, 7, 5 + index],
                SamplingParams(
                    temperature=0.8 if index % 2 else 0.0, seed=index, max_tokens=40 + index, ignore_eos=True
                ),
            )
            for index in range(6)
        ]
        return [handle.result().raise_for_error().token_ids for handle in handles]


@pytest.mark.supports("On a GPU", "speculative decoding in CUDA graphs, the same tokens as without")
@pytest.mark.parametrize("name", ["ngram", "draft_model", "medusa", "medusa tree", "eagle"])
def test_the_same_tokens_from_recorded_steps(
    model: Path, heads: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(model)
    recorded: list[Any] = []
    record = Recordings._record

    def seen(self: Recordings, key: Any, work: Any) -> Any:
        recorded.append(key)
        return record(self, key, work)

    monkeypatch.setattr(Recordings, "_record", seen)
    kind, *tree = name.split()
    options: dict[str, Any] = {"min_n": 1} if name == "ngram" else {"model": str(heads.get(kind, model))}
    options |= {"choices": [[0], [0, 0], [1], [0, 1], [1, 0], [2]]} if tree else {"drafts": 3}
    speculator = {"use": kind, "options": options}
    assert tokens(model, speculator=speculator, adapt_drafts=False) == expected
    assert any(isinstance(part, StepShape) and part.drafts for key in recorded for part in key)
    torch.cuda.synchronize()
