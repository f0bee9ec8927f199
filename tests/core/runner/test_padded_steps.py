"""Steps that are filled up with idle rows and tokens, as recorded ones are, give what exact ones give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from msgspec.structs import replace

from pegboard import SamplingParams
from pegboard.contracts.scheduler import RowPlan, StepPlan
from pegboard.models.llama import Llama
from pegboard.request import Request
from pegboard.runner import LocalExecutor
from pegboard.runner.batching import most_packed, pack
from pegboard.runner.model_runner import ModelRunner
from pegboard.runner.step_shape import Limits, StepShape, exact_shape, padded_shape, split_rows
from pegboard.testing.tiny import tiny_model

LIMITS = Limits(rows=5, step_tokens=40, length=200, decode_width=1)


class PaddedExecutor(LocalExecutor):
    shapes: list[tuple[StepShape, bool]] = []

    @classmethod
    def pads(cls, device: str) -> bool:
        return True

    @classmethod
    def _watched(cls, runner: ModelRunner, survey: Any) -> ModelRunner:
        shape_of = runner._shape
        runner._shape = lambda rows: cls.shapes.append(found := shape_of(rows)) or found  # type: ignore[method-assign,func-returns-value]
        return runner


def requests() -> list[Request]:
    random = numpy.random.default_rng(3)
    found = []
    for index, length in enumerate((3, 37, 1, 18, 55, 2, 16, 29)):
        sampling = SamplingParams(
            temperature=0.0 if index % 2 else 0.9, seed=index, max_tokens=5 + 3 * index, ignore_eos=True
        )
        found.append(Request(prompt=random.integers(3, 200, length).tolist(), sampling=sampling))
    found.append(Request(prompt=found[4].prompt, sampling=SamplingParams(temperature=0.0, max_tokens=9, logprobs=3)))
    found.append(
        Request(prompt=[5, 6, 7, 8], sampling=SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1))
    )
    return found


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_padded_steps_give_what_exact_ones_give(
    tmp_path: Path, make_engine: Callable[..., Any], padding: Callable[..., Any], architecture: str, ahead: int
) -> None:
    extra = {} if architecture == "llama" else {"head_dim": 16, "sliding_window": 20}
    path = tiny_model(tmp_path / "m", architecture=architecture, std=0.4, seed=5, **extra)
    settings = {"dtype": "float64", "max_rows": LIMITS.rows, "max_step_tokens": LIMITS.step_tokens, "run_ahead": ahead}
    found = []
    for parts in ({}, dict.fromkeys(("ops", "attention", "executor"), "padding")):
        PaddedExecutor.shapes = []
        engine = make_engine(path, device="cpu", plugins=[padding(executor=PaddedExecutor)], **settings, **parts)
        outputs = [output.raise_for_error() for output in engine.generate(requests())]
        found.append([output.token_ids for output in outputs])
        logprobs = [[p.logprob for p in output.completions[0].logprobs or ()] for output in outputs]
        found.append(logprobs)
    assert found[0] == found[2]
    assert sum(len(row) for row in found[1]) > 0
    for exact, padded in zip(found[1], found[3], strict=True):
        assert padded == pytest.approx(exact, abs=1e-9)
    padded_shapes = {shape for shape, padded in PaddedExecutor.shapes if padded}
    assert any(shape.prefill and shape.decode for shape in padded_shapes)
    assert any(shape.chain for shape in padded_shapes)
    assert len(padded_shapes) < len(PaddedExecutor.shapes) / 2  # they come again


def rows_of(*queries: int, fed: bool = False, samples: bool = True) -> list[RowPlan]:
    return [
        RowPlan(id=str(i), slot=i, query=query, start=7 * i, tokens=() if fed else tuple(range(query)), samples=samples)
        for i, query in enumerate(queries)
    ]


@pytest.mark.parametrize(
    "rows", [rows_of(1), rows_of(1, 1, 1, fed=True), rows_of(1, 1, 17, 3), rows_of(9, samples=False), rows_of(40)]
)
def test_a_padded_shape_holds_the_exact_one(rows: list[RowPlan]) -> None:
    exact = exact_shape(rows, LIMITS)
    padded = padded_shape(exact, LIMITS)
    assert padded is not None
    assert padded.rows >= exact.rows
    assert padded.tokens >= exact.tokens
    assert padded.samples >= exact.samples
    assert padded_shape(padded, LIMITS) == padded
    for part in (padded.decode, padded.prefill):
        if part is not None:
            assert part.rows <= LIMITS.rows
            assert part.tokens <= LIMITS.step_tokens
            assert exact.bounds.max_kv <= part.max_kv <= LIMITS.length
    for shape in (exact, padded):
        assert len(pack(rows, split_rows(rows, 1), shape, idle=5)) <= most_packed(LIMITS)


def test_rows_with_scored_prompts_or_drafts_are_of_their_own_kind() -> None:
    scored = [RowPlan(id="a", slot=0, query=3, start=0, tokens=(1, 2, 3), targets=(2, 3, -1))]
    assert padded_shape(exact_shape(scored, LIMITS), LIMITS) is None
    wide = Limits(rows=5, step_tokens=40, length=200, decode_width=4)
    assert padded_shape(exact_shape(rows_of(3, 1), wide), wide) is None


def test_the_plan_of_a_step_is_not_changed(tmp_path: Path) -> None:
    """A vector is made of the plan's rows alone: idle rows and tokens have the idle slot, and no length."""
    rows = rows_of(1, 1, 5)
    exact = exact_shape(rows, LIMITS)
    shape = padded_shape(exact, LIMITS)
    assert shape is not None
    packed = torch.from_numpy(pack(rows, 2, shape, idle=5))
    slots, advance = packed[: shape.rows].tolist(), packed[shape.rows : 2 * shape.rows].tolist()
    assert slots[:2] == [0, 1]
    assert advance[:2] == [1, 1]
    assert slots[shape.decode.rows if shape.decode else 0] == 2
    assert sorted(set(slots) - {0, 1, 2}) in ([], [5])
    assert sum(advance) == 7
    assert StepPlan(id=1, rows=tuple(rows)).rows == tuple(rows)


@pytest.mark.parametrize("narrows", [True, False])
def test_as_many_choices_as_tokens_are_still_picked_out(
    tmp_path: Path,
    make_engine: Callable[..., Any],
    padding: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    narrows: bool,
) -> None:
    """16 decode rows and a prompt of 9 tokens: 32 tokens and 32 choices in the padded step. A model may leave out the
    tokens that nobody wants, or not."""
    if not narrows:
        forward = Llama.forward
        monkeypatch.setattr(Llama, "forward", lambda model, given: forward(model, replace(given, outputs=None)))
    path = tiny_model(tmp_path / "m", std=0.4, seed=5)
    greedy = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    found = []
    for parts in ({}, dict.fromkeys(("ops", "attention", "executor"), "padding")):
        PaddedExecutor.shapes = []
        engine = make_engine(
            path, device="cpu", dtype="float64", plugins=[padding(executor=PaddedExecutor)], max_rows=40, **parts
        )
        handles = [engine.submit([3 + i, 9], greedy) for i in range(16)]
        for handle in handles:
            assert handle.take() is not None  # it is a decode row from now on
        late = engine.generate(
            Request(prompt=list(range(5, 14)), sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        )
        found.append([late.token_ids, *(handle.result().token_ids for handle in handles)])
    assert found[0] == found[1]
    assert any(padded and shape.prefill and shape.samples == shape.tokens for shape, padded in PaddedExecutor.shapes)
