"""benchmarks/speculation.py, reduced: its arms choose the same tokens, and its speed-ups are those of the pairs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

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


def test_heads_have_arms_of_their_own(speculation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path / "model", max_position_embeddings=1024, vocab_size=300)
    heads = tmp_path / "heads"
    heads.mkdir()
    zeros = {"0.0.linear.weight": torch.zeros(64, 64), "0.0.linear.bias": torch.zeros(64)}
    save_file(zeros, heads / "model.safetensors")
    config = {"medusa_num_heads": 1, "medusa_num_layers": 1, "training": {"steps": 3}}
    (heads / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = ["--model", str(model), "--rounds", "1", "--tokens", "8", "--prompts", "2", "--prompts-of", "chat"]
    assert speculation.main([*shape, "--heads", f"medusa={heads}", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:6]] == ["plain", "ngram", "ngram all", "medusa", "medusa all"]
    [file] = tmp_path.glob("speculation-*.json")
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told["heads"] == [{"kind": "medusa", "folder": "heads", "training": {"steps": 3}}]
    assert told["prompts_of"] == "chat"


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
