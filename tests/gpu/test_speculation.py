"""Speculation on a CUDA device: the tokens of plain decoding, from recorded steps, without waiting for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine, Part, SamplingParams, hookimpl
from pegboard.contracts.speculator import SpeculatorNeed
from pegboard.runner.recording import Recordings
from pegboard.runner.step_shape import StepShape
from pegboard.testing.tiny import tiny_model
from pegboard_sampling.speculation.draft_model import DraftModelSpeculator
from pegboard_sampling.speculation.options import DraftModelOptions
from pegboard_sampling.speculation.pipelining import Pipeline

pytestmark = pytest.mark.gpu
TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "model", tokenizer=False)


def tokens(model: Path, **settings: Any) -> list[tuple[int, ...]]:
    return measured_tokens(model, **settings)[0]


def measured_tokens(model: Path, count: int = 6, **settings: Any) -> tuple[list[tuple[int, ...]], Any]:
    with Engine(model, device="cuda", dtype="float32", max_rows=8, **settings) as engine:
        handles = [
            engine.submit(
                [5, 6, 7, 5, 6, 7, 5 + index],
                SamplingParams(
                    temperature=0.8 if index % 2 else 0.0, seed=index, max_tokens=40 + index, ignore_eos=True
                ),
            )
            for index in range(count)
        ]
        found = [handle.result().raise_for_error().token_ids for handle in handles]
        return found, engine.stats().speculation


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


class Apart(DraftModelSpeculator):
    """Pipelined, whatever device it has."""

    def __init__(self, need: SpeculatorNeed, options: DraftModelOptions) -> None:
        super().__init__(need, options)
        if self._pipeline is None:
            self._pipeline = Pipeline(self._passes, torch.device("cuda:0"), need.slots, ahead=not need.wants_probs)
        self.capturable = False


class Parts:
    @hookimpl
    def pegboard_parts(self) -> Any:
        return (Part(role="speculator", name="apart", factory=Apart, options=DraftModelOptions, summary="for tests"),)


@pytest.mark.supports("On a GPU", "a draft model on another device, which drafts on while the target verifies")
@pytest.mark.parametrize("ahead", [0, 2, 6])
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=TWO_DEVICES)])
def test_drafting_while_the_target_verifies(
    model: Path, device: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens; a draft that mostly agrees is drafted on from, and its drafts are as good as others."""
    expected = tokens(model)
    ran: list[Any] = []
    run = Recordings.run

    def seen(self: Recordings, key: Any, work: Any) -> Any:
        ran.extend(part for part in key if isinstance(part, tuple) and part[0] in ("draft", "on"))
        return run(self, key, work)

    monkeypatch.setattr(Recordings, "run", seen)
    monkeypatch.setattr("pegboard_sampling.speculation.pace.adjusted", lambda *_: ahead)
    speculator = {"use": "apart", "options": {"model": str(model), "drafts": 3, "device": device, "dtype": "bfloat16"}}
    found, speculation = measured_tokens(model, speculator=speculator, adapt_drafts=False, plugins=[Parts()])
    assert found == expected
    assert speculation.mean_length > 2.8
    further = [key for key in ran if key[0] == "on"]
    assert max((key[2] - key[1] for key in further if key[1] >= 3), default=0) == min(ahead, 4)
    # Rows of a step are drafted for anew all together: one alone shows better what stood
    del ran[:]
    alone, speculation = measured_tokens(model, 1, speculator=speculator, adapt_drafts=False, plugins=[Parts()])
    assert alone == expected[:1]
    anew = sum(key[0] == "draft" for key in ran)
    assert (anew < 0.8 * speculation.proposed[0]) == (ahead > 0)
    assert (("on", 1, 3) in ran) == (ahead == 2)


def test_rejection_from_another_device(model: Path) -> None:
    """Distributions come along; nothing is drafted ahead. A draft that is the target is accepted."""
    speculator = {"use": "apart", "options": {"model": str(model), "drafts": 3, "candidates": 211, "dtype": "float32"}}
    _, speculation = measured_tokens(
        model,
        speculator=speculator,
        sampler={"use": "fused", "options": {"verification": "rejection"}},
        adapt_drafts=False,
        plugins=[Parts()],
    )
    assert speculation.mean_length > 3.7
