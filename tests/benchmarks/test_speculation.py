"""benchmarks/speculation.py, reduced: its arms choose the same tokens, and its speed-ups are those of the pairs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pegboard.testing.tiny import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def speculation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_speculation", ROOT / "benchmarks" / "speculation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arms_choose_the_same_tokens(speculation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path / "model", max_position_embeddings=1024, vocab_size=300)
    shape = ["--model", str(model), "--draft", str(model), "--rounds", "2", "--tokens", "12", "--prompts", "2"]
    assert speculation.main([*shape, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == ["plain", "ngram", "ngram all", "draft"]
    assert all(" yes" in line for line in lines[1:5])
    assert len(list(tmp_path.glob("speculation-*.json"))) == 1


def test_the_speed_up_is_the_median_of_the_pairs(speculation: Any) -> None:
    class Arm:
        def __init__(self, name: str, seconds: list[float]) -> None:
            self.name, self.seconds, self.tokens, self.engine = name, seconds, [(1, 2, 3)], self

        def stats(self) -> Any:
            return type("Stats", (), {"speculation": None})()

    found = speculation.summary([Arm("plain", [2.0, 4.0, 9.0]), Arm("other", [1.0, 4.0, 3.0])])
    assert [row["speedup"] for row in found] == [1.0, 2.0]
    assert found[1]["tokens_per_second"] == pytest.approx(2 / 3)
    assert found[1]["match"]
