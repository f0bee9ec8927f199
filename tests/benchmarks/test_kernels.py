"""benchmarks/kernels.py: plots of what was measured, without a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results" / "h200").glob("kernels-*.json"))


def test_the_committed_run_has_every_part_with_its_error_and_ceiling() -> None:
    record = json.loads(RESULTS[-1].read_text())
    for name, ceiling in (("ops", "of ceiling"), ("decode", "ceiling"), ("prefill", "of matmul")):
        assert record[name]
        for row in record[name]:
            assert ceiling in row
            assert row["error"] < 2e-2  # that of eight bits, at the worst


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "benchmarks" / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    drawn = kernels.plot(json.loads(RESULTS[-1].read_text()), tmp_path)
    assert [path.name for path in drawn] == ["prefill.png", "decode.png", "ops.png"]
    assert all(5_000 < path.stat().st_size < 100_000 for path in drawn)
