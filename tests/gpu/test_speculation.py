"""Speculation on a CUDA device: the tokens of plain decoding, from recorded steps, without waiting for the device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pegboard import Engine, SamplingParams
from pegboard.runner.recording import Recordings
from pegboard.runner.step_shape import StepShape
from pegboard.testing.tiny import tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "model", tokenizer=False)


def tokens(model: Path, **settings: Any) -> list[tuple[int, ...]]:
    with Engine(model, device="cuda", dtype="float32", max_rows=8, **settings) as engine:
        handles = [
            engine.submit(
                [5, 6, 7, 5, 6, 7, 5 + index],
                SamplingParams(
                    temperature=0.8 if index % 2 else 0.0, seed=index, max_tokens=40 + index, ignore_eos=True
                ),
            )
            for index in range(6)
        ]
        return [handle.result().raise_for_error().token_ids for handle in handles]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random ones: most of what they propose is refused."""
    folder, size = tmp_path_factory.mktemp("heads"), 64
    generator = torch.Generator().manual_seed(0)
    medusa = {}
    for head in range(3):
        medusa[f"{head}.0.linear.weight"] = torch.randn(size, size, generator=generator) * 0.1
        medusa[f"{head}.0.linear.bias"] = torch.zeros(size)
    eagle = {"fc.weight": (size, 2 * size), "layers.0.post_attention_layernorm.weight": (size,)}
    eagle |= {f"layers.0.self_attn.{part}_proj.weight": (size, size) for part in "qkvo"}
    eagle |= {f"layers.0.mlp.{part}_proj.weight": (size, size) for part in ("gate", "up", "down")}
    layer = {name: torch.randn(shape, generator=generator) / 8 for name, shape in eagle.items()}
    config = {"hidden_size": size, "intermediate_size": size, "num_hidden_layers": 1, "num_attention_heads": 4}
    return {
        "medusa": _written(folder / "medusa", medusa, {"medusa_num_heads": 3, "medusa_num_layers": 1}),
        "eagle": _written(folder / "eagle", layer, {**config, "vocab_size": 211, "rope_theta": 10000.0}),
    }


def _written(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["ngram", "draft_model", "medusa", "eagle"])
def test_the_same_tokens_from_recorded_steps(
    model: Path, heads: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(model)
    recorded: list[Any] = []
    record = Recordings._record

    def seen(self: Recordings, key: Any, work: Any) -> Any:
        recorded.append(key)
        return record(self, key, work)

    monkeypatch.setattr(Recordings, "_record", seen)
    options: dict[str, Any] = {"drafts": 3} | (
        {"min_n": 1} if name == "ngram" else {"model": str(heads.get(name, model))}
    )
    speculator = {"use": name, "options": options}
    assert tokens(model, speculator=speculator, adapt_drafts=False) == expected
    assert any(isinstance(part, StepShape) and part.drafts for key in recorded for part in key)
    torch.cuda.synchronize()
