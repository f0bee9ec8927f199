"""Qwen2 and Qwen3 against transformers, with windows on some layers and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import ConfigError, Engine
from pegboard.testing.tiny import tiny_model

LONG = torch.randint(3, 211, (50,), generator=torch.Generator().manual_seed(2)).tolist()
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.supports("Models", "Qwen2, Qwen2.5 and Qwen3")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 4, 16), (4, 2, 16), (14, 2, 8), (4, 1, 24)])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_heads(
    tmp_path: Path,
    check: Callable[..., None],
    architecture: str,
    heads: int,
    kv_heads: int,
    head_size: int,
    tied: bool,
) -> None:
    hidden = {14: 112}.get(heads, heads * head_size if architecture == "qwen2" else 64)
    path = tiny_model(
        tmp_path / "m",
        architecture=architecture,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=hidden,
        tie_word_embeddings=tied,
        **({"head_dim": head_size} if architecture == "qwen3" else {}),
    )
    check(path)


def test_qwen3_with_biases(tmp_path: Path, check: Callable[..., None]) -> None:
    check(tiny_model(tmp_path / "m", architecture="qwen3", head_dim=16, attention_bias=True))


@pytest.mark.supports("Models", "layers with a window beside layers without")
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "kinds", [None, ["sliding_attention", "full_attention", "sliding_attention"]], ids=["from-1-on", "by-name"]
)
def test_windows_beside_full_layers(
    tmp_path: Path, check: Callable[..., None], architecture: str, kinds: list[str] | None
) -> None:
    path = tiny_model(
        tmp_path / "m",
        architecture=architecture,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        layer_types=kinds,
        **({"head_dim": 16} if architecture == "qwen3" else {}),
    )
    check(path, LONG, max_step_tokens=8, max_rows=1)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_yarn_past_the_original_context(tmp_path: Path, check: Callable[..., None], architecture: str) -> None:
    head = {"head_dim": 16} if architecture == "qwen3" else {}
    check(tiny_model(tmp_path / "m", architecture=architecture, rope_parameters=YARN, **head), LONG)


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_bias": True},
        {"layer_types": ["sliding_attention"] * 3},
        {"layer_types": ["full_attention"] * 2},
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        {"use_sliding_window": "yes"},
        {"hidden_act": "relu6"},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, edit: Any, change: dict[str, Any]) -> None:
    path = tiny_model(tmp_path / "m", architecture="qwen2")
    edit(path, **change)
    with pytest.raises(ConfigError, match=next(iter(change)).replace("hidden_act", "relu6")):
        Engine(path, device="cpu")
