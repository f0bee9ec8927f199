"""Verify steps that are filled up, as recorded ones are, give the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import pad

from pegboard import Engine, SamplingParams
from pegboard.contracts.batch import Bounds
from pegboard.contracts.part import Part
from pegboard.contracts.sampler import SampleOutput, SampleRows, VerifyOutput, VerifyRows
from pegboard.contracts.scheduler import RowPlan
from pegboard.contracts.speculator import DraftContext, Drafts
from pegboard.runner import LocalExecutor
from pegboard.runner.step_shape import Limits, StepShape, exact_shape, padded_shape
from pegboard.testing.tiny import tiny_model
from pegboard_sampling.speculation.ngram import NGramSpeculator
from pegboard_sampling.speculation.options import NGramOptions
from pegboard_sampling.torch_sampler import TorchSampler

LIMITS = Limits(rows=5, step_tokens=40, length=200, decode_width=4)


class Recordable(NGramSpeculator):
    """Nothing is asked for before the step; token 0 is proposed where nothing is found."""

    def propose(self, context: DraftContext) -> Drafts:
        ids = super().propose(context).ids
        return Drafts(ids=ids.clamp(min=0))


class Outside(Recordable):
    capturable = False


class RecordableSampler(TorchSampler):
    """Verifies what a recorded step would: with its key, and idle rows, which keep anything."""

    capturable = True
    verified = 0

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        own = len(rows.host_slots)
        few = replace(rows, slots=rows.slots[:own], positions=rows.positions[:own])
        ids = super().sample(logits[:own], few).ids
        return SampleOutput(ids=pad(ids, (0, len(rows.slots) - own), value=7))

    def verify(self, logits: Tensor, rows: VerifyRows) -> VerifyOutput:
        own, all_rows = len(rows.host_slots), len(rows.slots)
        assert rows.key is not None
        assert rows.host_queries is not None
        assert len(rows.host_queries) == all_rows
        assert logits.shape[0] == sum(rows.host_queries)
        few = replace(
            rows,
            slots=rows.slots[:own],
            positions=rows.positions[:own],
            query_start=rows.query_start[: own + 1],
            ids=rows.ids[: sum(rows.host_queries[:own])],
            host_queries=rows.host_queries[:own],
        )
        found = super().verify(logits[: len(few.ids)], few)
        RecordableSampler.verified += all_rows > own
        idle = all_rows - own
        return VerifyOutput(
            ids=pad(found.ids, (0, 0, 0, idle), value=7),
            count=pad(found.count, (0, idle), value=2),
            path=pad(found.path, (0, 0, 0, idle), value=0),
        )


class PaddedExecutor(LocalExecutor):
    shapes: list[StepShape] = []

    @classmethod
    def pads(cls, device: str) -> bool:
        return True

    @classmethod
    def _watched(cls, runner: Any, survey: Any) -> Any:
        runner._stepping.drafting.ahead = True
        shape_of = runner._shape

        def shape(rows: Sequence[RowPlan]) -> tuple[StepShape, bool]:
            found: tuple[StepShape, bool] = shape_of(rows)
            if found[1]:
                cls.shapes.append(found[0])
            return found

        runner._shape = shape
        return runner


def speculators() -> list[Part]:
    return [
        Part(role="speculator", name=name, factory=part, options=NGramOptions, summary="for tests")
        for name, part in (("inside", Recordable), ("outside", Outside))
    ]


def asked() -> list[SamplingParams]:
    """Ends come in the middle of steps."""
    return [
        SamplingParams(temperature=0.0 if index % 2 else 0.8, seed=index, max_tokens=7 + 5 * index, ignore_eos=True)
        for index in range(5)
    ]


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize(("speculator", "sampler"), [("inside", "torch"), ("outside", "torch"), ("inside", "padding")])
def test_tokens_are_those_of_exact_steps(
    tmp_path: Path, padding: Callable[..., Any], speculator: str, sampler: str, run_ahead: int
) -> None:
    """With a sampler that is recorded, too, whose idle rows say that they kept something."""
    model = tiny_model(tmp_path / "model", max_position_embeddings=64, tokenizer=False)
    found = []
    parts = {"ops": "padding", "attention": "padding", "executor": "padding", "sampler": sampler}
    drafting = {"speculator": {"use": speculator, "options": {"drafts": 3, "min_n": 1}}, "adapt_drafts": False}
    PaddedExecutor.shapes.clear()
    RecordableSampler.verified = 0
    for settings in ({}, {**parts, **drafting, "run_ahead": run_ahead}):
        with Engine(
            model,
            device="cpu",
            plugins=[padding(speculators(), executor=PaddedExecutor, sampler=RecordableSampler)],
            max_rows=5,
            **{"executor": "local", **settings},
        ) as engine:
            handles = [engine.submit([5, 6, 7, 5, 6, 7, 5 + n], sampling) for n, sampling in enumerate(asked())]
            found.append([handle.result().raise_for_error().token_ids for handle in handles])
    assert found[0] == found[1]
    verified = [shape for shape in PaddedExecutor.shapes if shape.drafts]
    assert verified
    assert all(shape.decode is not None and shape.decode.min_query == shape.decode.max_query for shape in verified)
    assert {shape.rows for shape in verified} <= {1, 2, 4, 5}
    assert (RecordableSampler.verified > 0) == (sampler == "padding")


def row(slot: int, drafts: int, **other: Any) -> RowPlan:
    return RowPlan(id=str(slot), slot=slot, query=1 + drafts, start=30, tokens=(), drafts=drafts, **other)


def test_verify_steps_of_many_kinds_have_few_shapes() -> None:
    exact = [exact_shape([row(slot, 3 if slot else short) for slot in range(3)], LIMITS) for short in (0, 1, 2, 3)]
    assert len(set(exact)) == 4
    [padded] = {padded_shape(shape, LIMITS) for shape in exact}
    assert padded is not None
    assert padded.decode == Bounds(rows=4, tokens=16, max_query=4, min_query=4, max_kv=200)
    assert (padded.samples, padded.verified, padded.drafts) == (16, 4, 3)


def test_drafts_beside_prompts_have_exact_shapes() -> None:
    chunk = RowPlan(id="p", slot=4, query=9, start=0, tokens=tuple(range(9)), samples=False)
    assert padded_shape(exact_shape([row(0, 3), chunk], LIMITS), LIMITS) is None
    late = RowPlan(id="q", slot=3, query=2, start=0, tokens=(4, 5))
    assert padded_shape(exact_shape([row(0, 3), late], LIMITS), LIMITS) is None


def test_the_idle_slot_proposes_nothing() -> None:
    from pegboard.runner.device_state import DeviceState
    from pegboard.runner.drafting import Drafting
    from pegboard.testing import SpeculatorSuite

    state = DeviceState([], 5, 64, 16, 4, "cpu")
    drafting = Drafting(Recordable(SpeculatorSuite.need(), NGramOptions(drafts=3, min_n=1)), state, None, 64)
    slots = torch.tensor([0, state.idle, state.idle])
    drafting.propose(slots, torch.tensor([1, 0, 0]), torch.tensor([0, 0, 0]), 3)
    assert state.drafts[0].tolist() == [0, 0, 0]
    assert state.drafts[state.idle].tolist() == [-1, -1, -1]
