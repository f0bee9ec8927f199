"""benchmarks/gpu_timing.py: what needs no device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def timing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_timing", ROOT / "benchmarks" / "gpu_timing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_copies_make_the_cache_cold(timing: ModuleType) -> None:
    assert timing.copies_for(1) == 64
    assert timing.copies_for(100_000_000) == 3
    assert timing.copies_for(10**12) == 2


def test_nan_never_passes(timing: ModuleType) -> None:
    right = torch.tensor([3.0, 4.0])
    assert timing.relative_error(right, right) == 0
    assert timing.relative_error(torch.tensor([3.0, 4.5]), right) == pytest.approx(0.1)
    assert timing.relative_error(torch.tensor([3.0, torch.nan]), right) == float("inf")


def test_table_has_a_column_for_every_name(timing: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    timing.print_table([{"a": 1.5, "b": "x"}, {"a": 0.0016, "c": 2}])
    assert capsys.readouterr().out.splitlines() == ["a        b  c", "1.50     x", "1.6e-03     2"]
