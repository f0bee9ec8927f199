"""benchmarks/overhead.py, reduced: its arms choose the same tokens, its sums are right, hooks stay off the step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pegboard import EngineConfig, load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def overhead() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_overhead", ROOT / "benchmarks" / "overhead.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tiny_path: Path, overhead: Any) -> EngineConfig:
    return load_config({**overhead.PARTS, "model": str(tiny_path), "device": "cpu", "max_length": 256, "max_rows": 3})


def test_arms_choose_the_same_tokens_and_take_turns(overhead: Any, config: EngineConfig) -> None:
    arms = overhead.make_arms(config)
    assert [arm.name for arm in arms] == ["hand", "hand again", "assembled", "observed"]
    times = overhead.measure(arms, 3, 1.0, 12)
    assert len(set(map(len, times.values()))) == 1
    assert len(times["hand"]) >= 9
    assert len(arms[0].tokens) % (3 * 13) == 0, "sequences run to their end"
    arms[2].tokens[-1] += 1
    with pytest.raises(RuntimeError, match="assembled chose other tokens than hand"):
        overhead.measure(arms, 3, 0.05, 12)


def test_the_share_is_that_of_the_pairs(overhead: Any) -> None:
    """Steps that grow by time: the paired differences are 1% whatever the noise."""
    hand = [1e-3 * (1 + 0.5 * (i % 7)) for i in range(70)]
    found = overhead.summary({"hand": hand, "assembled": [t + 2.5e-5 for t in hand]})
    assert found["hand"]["step_ms"] == pytest.approx(2.5)
    assert found["assembled"]["overhead_us"] == pytest.approx(25)
    assert found["assembled"]["share"] == pytest.approx(0.01)
    assert found["assembled"]["bound"] == pytest.approx([0.01, 0.01])


def test_hooks_are_called_once_an_event_and_never_without_an_observer(overhead: Any, config: EngineConfig) -> None:
    found = overhead.count_hooks(config, requests=2, tokens=4)
    assert found["without an observer"] == {}
    assert set(found["calls per event"].values()) == {1.0}
    assert found["with one observer"]["pegboard_request_finished"] == 2
    assert 4 <= found["with one observer"]["pegboard_step_done"] <= 8
