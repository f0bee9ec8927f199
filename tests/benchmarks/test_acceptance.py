"""benchmarks/acceptance.py, reduced: its coins are kept as they fell, and its theory is that of the definition."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 128,
    "eos_token_id": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def acceptance() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_acceptance", ROOT / "benchmarks" / "acceptance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_coins_are_kept_as_they_fell(acceptance: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    options = ["--model", f"random:{tmp_path / 'shape.json'}", "--device", "cpu", "--kv-memory", "8MiB"]
    options += ["--tokens", "61", "--rounds", "1", "--drafts", "3", "--out", str(tmp_path)]
    assert acceptance.main([*options, *("--acceptance", "1", "--acceptance", "0.5", "--acceptance", "0")]) == 0
    assert "predicted" in capsys.readouterr().out
    [file] = tmp_path.glob("acceptance-*.json")
    told = json.loads(file.read_text(encoding="utf-8"))
    always, sometimes, never = told["runs"]
    # One token is the prompt's, then 15 steps of four
    assert (always["kept"], always["steps"], always["match"]) == (4.0, 15, True)
    assert never["kept"] == 1.0
    assert 1.2 < sometimes["kept"] < 2.8
    assert sometimes["match"]
    assert never["match"]
    [way] = told["steps"]
    cost = 3 * way["c_draft"] + way["c_verify"]
    assert [row["predicted"] * cost for row in told["runs"]] == pytest.approx([4.0, 1.875, 1.0])
    assert told["parts"]["sampler"] == told["speculating"]["sampler"] == "torch"


def test_tokens_of_a_step_are_those_of_independent_coins(acceptance: Any) -> None:
    for share in (0.0, 0.3, 0.8):
        for drafts in (1, 4):
            ways = [share**count * (1 - share) * (1 + count) for count in range(drafts)]
            assert acceptance.kept(share, drafts) == pytest.approx(sum(ways) + share**drafts * (1 + drafts))
    assert acceptance.kept(1.0, 5) == 6.0
