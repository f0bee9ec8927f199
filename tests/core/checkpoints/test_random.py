"""Random weights: the tensors that a saved checkpoint of the config would hold, the same numbers each time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import CheckpointError, ConfigError, Engine, SamplingParams
from pegboard.assembly import plan_engine
from pegboard.checkpoints.random import RandomCheckpoint
from pegboard.checkpoints.safetensors import SafetensorsCheckpoint
from pegboard.hub import resolve_model
from pegboard.shapes import SHAPES
from pegboard.testing.tiny import tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"architecture": "llama", "tie_word_embeddings": True},
    "llama, biases": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "phi3": {},
    "gemma3_text": {"head_dim": 16, "tie_word_embeddings": True},
}
#: Numbers that the makers of the models state.
PARAMETERS = {
    "llama-8b": 8_030_261_248,
    "llama-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


def opened(name: str | Path) -> RandomCheckpoint:
    return RandomCheckpoint.open(resolve_model(f"random:{name}"))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_holds_what_a_saved_model_holds(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m", **{"architecture": family, **FAMILIES[family]})
    saved = SafetensorsCheckpoint.open(path)
    expected = {name: info.shape for name, info in saved.tensors().items()}
    saved.close()
    assert {name: info.shape for name, info in opened(path).tensors().items()} == expected


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_have_the_size_of_their_models(name: str) -> None:
    infos = opened(name).tensors().values()
    assert sum(math.prod(info.shape) for info in infos) == PARAMETERS[name]
    assert sum(info.nbytes for info in infos) == 2 * PARAMETERS[name]


def test_numbers_are_a_matter_of_the_tensors_name(tiny_path: Path) -> None:
    one, other = opened(tiny_path), opened(tiny_path / "config.json")
    name = "model.layers.1.mlp.up_proj.weight"
    values = one.read(name)
    assert torch.equal(values, other.read(name))
    assert torch.equal(one.read(name, dtype="float64"), values.double())
    assert torch.equal(one.read(name, dtype="bfloat16"), values.bfloat16())
    assert torch.equal(one.read(name, dim=1, start=5, length=7), values[:, 5:12])
    assert not torch.equal(values, one.read("model.layers.2.mlp.up_proj.weight"))
    spread = json.loads((tiny_path / "config.json").read_text())["initializer_range"]
    assert values.std() == pytest.approx(spread, rel=0.05)
    assert abs(values.mean()) < 0.05 * spread
    assert torch.equal(one.read("model.norm.weight"), torch.ones(64))


def test_an_engine_runs_on_it(tiny_path: Path, make_engine: Callable[..., Engine]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = []
    for _ in range(2):
        engine = make_engine(f"random:{tiny_path}", device="cpu")
        assert engine.plan.model == f"random:{tiny_path / 'config.json'}"
        outputs.append(engine.generate([[1, 5, 9]], greedy)[0].token_ids)
    assert len(outputs[0]) == 6
    assert outputs[0] == outputs[1]
    packed = make_engine(f"random:{tiny_path}", device="cpu", quantizer="int8-cpu")
    assert len(packed.generate([[1, 5, 9]], greedy)[0].token_ids) == 6


def test_a_large_shape_is_planned_without_being_drawn() -> None:
    plan = plan_engine("random:llama-1b", device="cpu", dtype="bfloat16", max_length=64, max_rows=1, kv_memory="64MB")
    assert plan.memory.weights == pytest.approx(2 * PARAMETERS["llama-1b"], rel=0.01)


def test_what_is_no_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'random:nothing' is neither a shape that is known \(llama-8b, "):
        resolve_model("random:nothing")
    file = tmp_path / "config.json"
    for text, words in (
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"dtype": "int8"}', "dtype is 'int8'"),
        ('{"quantization_config": {"quant_method": "awq"}}', "random weights are dense"),
        ('{"architectures": ["NoSuchModel"]}', "not NoSuchModel"),
    ):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            opened(tmp_path).tensors()
    with pytest.raises(ConfigError, match="NoSuchModel"):
        plan_engine(f"random:{tmp_path}", device="cpu")
