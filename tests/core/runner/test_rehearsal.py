"""Steps that are run ahead leave nothing behind, and are those that requests lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import SamplingParams
from pegboard.contracts.sampler import SampleOutput, SampleRows
from pegboard.request import Request
from pegboard.runner import LocalExecutor
from pegboard.runner.batching import pack
from pegboard.runner.rehearsal import Rehearsal, shapes_ahead
from pegboard.runner.step_shape import Limits, StepShape
from pegboard.testing.tiny import tiny_model
from pegboard_attention.torch_backend import TorchAttention
from pegboard_sampling.torch_sampler import TorchSampler


class Nothing(TorchAttention):
    """Idle rows see nothing."""

    capturable = True

    def plan(self, rows: Any, layer: Any, workspace: Any) -> Any:
        assert rows.bounds.rows == len(rows.kv_len)
        return rows

    def forward(self, q: Any, k: Any, v: Any, cache: Any, plan: Any, sinks: Any = None) -> Any:
        return torch.zeros_like(q)


class Recordable(TorchSampler):
    """Greedy, but tells what it was asked to rehearse."""

    capturable = True
    asked: list[tuple[int, frozenset[str]]] = []

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> SampleOutput:
        self.asked.append((len(logits), self.features(rows.host_slots)))
        return SampleOutput(ids=logits.argmax(-1))


class Padded(LocalExecutor):
    @classmethod
    def pads(cls, device: str) -> bool:
        return True


def run_ahead(runner: Any) -> set[Any]:
    rehearsal = Rehearsal(runner._stepping, runner.parts.sampler, runner._limits)
    with torch.inference_mode():
        for shapes in shapes_ahead(runner._limits):
            rehearsal.run(shapes, lambda shape: torch.from_numpy(pack([], 0, shape, runner._state.idle)))
    return rehearsal.done


@pytest.fixture
def engine(tmp_path: Path, make_engine: Callable[..., Any], padding: Callable[..., Any]) -> Any:
    Recordable.asked = []
    return make_engine(
        tiny_model(tmp_path / "m", std=0.4, seed=5),
        device="cpu",
        plugins=[padding(attention=Nothing, executor=Padded, sampler=Recordable)],
        max_rows=6,
        max_step_tokens=64,
        run_ahead=1,
        **dict.fromkeys(("ops", "attention", "executor", "sampler"), "padding"),
    )


def test_nothing_stays_behind(engine: Any) -> None:
    runner = engine._phases.executor._runner
    state = runner._state
    before = [t.clone() for t in (*state.tables, state.lengths, state.last_ids[:-1])]
    run_ahead(runner)
    after = (*state.tables, state.lengths, state.last_ids[:-1])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for cache in runner.caches:
        for tensor in cache.tensors.values():
            assert not tensor[1:].any(), "only the null page may be written"


def test_the_steps_of_requests_were_rehearsed(engine: Any) -> None:
    runner = engine._phases.executor._runner
    done = run_ahead(runner)
    met: set[StepShape] = set()
    shape_of = runner._shape
    runner._shape = lambda rows: (met.add(shape_of(rows)[0]), shape_of(rows))[1]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.generate([Request(prompt=[5, 6, 7 + i], sampling=sampling) for i in range(6)])
    engine.generate([Request(prompt=list(range(5, 60)), sampling=sampling)])
    decode = {shape for shape in met if shape.prefill is None}
    assert decode
    assert decode <= done
    assert any(shape.prefill in {s.prefill for s in done if isinstance(s, StepShape)} for shape in met if shape.prefill)


def test_every_way_to_choose_is_tried_at_every_count(engine: Any) -> None:
    runner = engine._phases.executor._runner
    run_ahead(runner)
    counts = {shape.samples for shapes in shapes_ahead(runner._limits) for shape in shapes} - {0}
    for count in counts:
        found = {features for rows, features in Recordable.asked if rows == count}
        assert frozenset() in found or any("noise" not in features for features in found)
        assert any("noise" in features for features in found)
        assert any({"noise", "top_k", "top_p"} <= features for features in found)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(rows=1, step_tokens=1, length=2, decode_width=1),
        Limits(rows=256, step_tokens=8192, length=131072, decode_width=1),
        Limits(rows=7, step_tokens=100, length=90, decode_width=4),
    ],
)
def test_shapes_keep_the_limits(limits: Limits) -> None:
    first, rest = shapes_ahead(limits)
    shapes: Sequence[StepShape] = [*first, *rest]
    assert len(set(shapes)) == len(shapes)
    assert any(shape.prefill is None for shape in shapes)
    for shape in shapes:
        assert shape.samples <= limits.rows
        for part in (shape.decode, shape.prefill):
            if part is not None:
                assert part.rows <= limits.rows
                assert part.max_kv <= limits.length
                assert part.tokens <= max(limits.step_tokens, limits.rows)
