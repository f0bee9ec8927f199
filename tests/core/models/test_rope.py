"""Rope tables against transformers' own functions, and every rope type end to end past the original context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import ConfigError, Engine
from pegboard.models.rope import make_rope, rope_parameters, rope_reach, rope_refusals, rotary_size
from pegboard.testing.tiny import tiny_model

SIZE, CONTEXT, ORIGINAL = 16, 256, 64
FACTORS = {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.0 + 0.9 * i for i in range(8)]}

TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn-ratio": {"rope_type": "yarn", "factor": None},
    "yarn-betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.75},
    "longrope": {"rope_type": "longrope", **FACTORS},
    "longrope-factor": {"rope_type": "longrope", "factor": 8.0, **FACTORS},
    "longrope-attention": {"rope_type": "longrope", "attention_factor": 1.3, **FACTORS},
}


def parameters(name: str) -> dict[str, Any]:
    original = {"original_max_position_embeddings": ORIGINAL} if name.split("-")[0] in _STRETCHED else {}
    return {"rope_theta": 5000.0, **TYPES[name], **original}


_STRETCHED = ("llama3", "yarn", "longrope")


def config(name: str) -> dict[str, Any]:
    return {"max_position_embeddings": CONTEXT, "rope_parameters": parameters(name)}


def transformers_table(name: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, SIZE / 2] for a sequence of `length`."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    made = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=SIZE,
        max_position_embeddings=CONTEXT,
        rope_parameters=parameters(name),
    )
    rotary = LlamaRotaryEmbedding(made)
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    return cos[0, :, : SIZE // 2], sin[0, :, : SIZE // 2]


@pytest.mark.parametrize("length", [ORIGINAL, CONTEXT])
@pytest.mark.parametrize("name", TYPES)
def test_tables_are_those_of_transformers(name: str, length: int) -> None:
    """For a length within the original context and beyond: longrope takes the short factors, then the long ones."""
    rope = make_rope(config(name), SIZE, length, device="cpu", dtype=torch.float32)
    cos, sin = transformers_table(name, length)
    torch.testing.assert_close(rope.cos, cos, atol=1e-6, rtol=0)
    torch.testing.assert_close(rope.sin, sin, atol=1e-6, rtol=0)


def test_both_dialects_mean_the_same() -> None:
    new = parameters("longrope")
    old = {key: value for key, value in new.items() if key not in ("rope_theta", "rope_type")} | {"type": "longrope"}
    context = {"max_position_embeddings": CONTEXT}
    assert rope_parameters({**context, "rope_theta": 5000.0, "rope_scaling": old}) == rope_parameters(
        {**context, "rope_parameters": new}
    ) | {"rope_type": "longrope"}


def test_an_original_context_outside_of_the_table_wins() -> None:
    """As transformers reads Phi-3."""
    found = rope_parameters({**config("longrope"), "original_max_position_embeddings": 32})
    assert found["original_max_position_embeddings"] == 32


def test_yarn_reaches_as_far_as_its_factor() -> None:
    """Qwen2.5's model cards add the table and leave max_position_embeddings alone."""
    named = {"max_position_embeddings": ORIGINAL, "rope_parameters": parameters("yarn")}
    assert rope_reach(named) == 4 * ORIGINAL
    assert rope_reach(config("yarn")) == CONTEXT
    assert rope_reach(config("dynamic")) == CONTEXT


def test_a_part_of_a_head_turns() -> None:
    assert rotary_size({}, 80) == 80
    assert rotary_size({"partial_rotary_factor": 0.4}, 80) == 32
    assert rotary_size({"rope_parameters": {"partial_rotary_factor": 0.75}}, 128) == 96


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rope_type": "yarn", "beta_fast": "32"}, ["yarn", "beta_fast"]),
        ({"rope_type": "yarn", "factor": -1.0}, ["yarn", "factor"]),
        ({"rope_type": "yarn", "truncate": 1}, ["yarn", "truncate"]),
        ({"rope_type": "yarn", "rope_theta": 1.0}, ["yarn", "rope_theta"]),
        ({"rope_type": "dynamic"}, ["dynamic", "factor"]),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, ["longrope", "long_factor"]),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}, ["short_factor", "7", "8"]),
        ({"rope_type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}, ["longrope", "short_factor"]),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, ["mrope_section"]),
        ({"full_attention": {"rope_type": "default"}}, ["full_attention"]),
        ({"rope_type": ["yarn"]}, ["yarn", "supported"]),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], words: list[str]) -> None:
    table = {"rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **wrong}
    reasons = "; ".join(rope_refusals({"max_position_embeddings": CONTEXT, "rope_parameters": table}, SIZE))
    assert all(word in reasons for word in words), reasons


PROMPT = torch.randint(3, 211, (90,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.supports("Models", "dynamic (up to the model's context), yarn and longrope scaling")
@pytest.mark.parametrize("name", ["dynamic", "yarn", "yarn-mscale", "longrope"])
def test_past_the_original_context(tmp_path: Path, check: Callable[..., None], name: str) -> None:
    path = tiny_model(tmp_path / "m", head_dim=SIZE, max_position_embeddings=CONTEXT, rope_parameters=parameters(name))
    check(path, PROMPT)


def test_longrope_with_a_length_within_the_original_context(tmp_path: Path, check: Callable[..., None]) -> None:
    path = tiny_model(
        tmp_path / "m", head_dim=SIZE, max_position_embeddings=CONTEXT, rope_parameters=parameters("longrope")
    )
    check(path, PROMPT[:32], max_length=ORIGINAL)


def test_yarn_beyond_max_position_embeddings(tmp_path: Path, check: Callable[..., None]) -> None:
    path = tiny_model(
        tmp_path / "m", head_dim=SIZE, max_position_embeddings=ORIGINAL, rope_parameters=parameters("yarn")
    )
    check(path, PROMPT)


def test_dynamic_ends_with_the_context(tmp_path: Path) -> None:
    """Beyond, the frequencies would have to change with the length of each row."""
    path = tiny_model(tmp_path / "m", max_position_embeddings=CONTEXT, rope_parameters=parameters("dynamic"))
    with pytest.raises(ConfigError, match=f"max_length: {CONTEXT + 1} is more than the {CONTEXT}"):
        Engine(path, device="cpu", max_length=CONTEXT + 1)
