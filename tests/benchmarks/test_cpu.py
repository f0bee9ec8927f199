"""benchmarks/cpu.py: its engines answer truthfully, and those that can't run are named."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pegboard import SamplingParams

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_cpu", ROOT / "benchmarks" / "cpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(model: Path) -> dict[str, Any]:
    prompts = [[3 + i, 5, 8, 13, 21] for i in range(2)]
    lone = [[[7] * 20, list(range(20))], [[9] * 30, list(range(30))]]
    return {
        "model": str(model),
        "folder": str(model),
        "threads": 1,
        "tokens": 4,
        "repeats": 1,
        "prefill": lone,
        "texts": prompts,
    }


def test_match_counts_up_to_the_first_difference(cpu: ModuleType) -> None:
    reference = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert cpu.match(reference, reference) == 1
    assert cpu.match([[1, 2, 9, 4], [5, 6, 7, 8]], reference) == 6 / 8
    assert cpu.match([[9, 2, 3, 4], [9, 6, 7, 8]], reference) == 0


def test_pegboard_answers_with_its_own_ids(cpu: ModuleType, tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    work = job(tiny_path) | {"quantizer": {"use": "none"}}
    work["texts"] = work["texts"] * 4
    answer = cpu.run(sys.executable, "pegboard_engine.py", work)
    assert "left_out" not in answer, answer
    assert len(answer["prefill"]) == 2
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine = make_engine(tiny_path, device="cpu", dtype="float64")
    assert answer["ids"] == [list(output.token_ids) for output in engine.generate(work["texts"], sampling)]
    assert {"decode_1", "decode_8", "end_to_end_8", "versions"} <= answer.keys()


def test_what_cannot_run_is_named(cpu: ModuleType, tmp_path: Path) -> None:
    left = cpu.run(sys.executable, "pegboard_engine.py", job(tmp_path) | {"quantizer": {"use": "none"}})
    assert "tmp" in left["left_out"] or str(tmp_path) in left["left_out"]
    found = {"prefill": [10.0, 20.0], "decode_1": 1.0, "decode_8": 2.0, "end_to_end_8": 3.0, "match": 0.5}
    lines = cpu.table({"other": left, "pegboard": found}).splitlines()
    assert "left out: " in lines[1]
    assert lines[2].split() == ["pegboard", "10.0", "20.0", "1.0", "2.0", "3.0", "0.500"]
