"""Phi-3 against transformers: fused matrices, partial rope, longrope, a window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import ConfigError, Engine
from pegboard.testing.tiny import tiny_model

LONG = torch.randint(3, 211, (50,), generator=torch.Generator().manual_seed(2)).tolist()


def longrope(rotary: int, **more: Any) -> dict[str, Any]:
    half = rotary // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.05 * i for i in range(half)],
        "long_factor": [1.0 + 0.9 * i for i in range(half)],
        **more,
    }


@pytest.mark.supports("Models", "Phi-3 and Phi-3.5")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_heads(tmp_path: Path, check: Callable[..., None], share: float, heads: int, kv_heads: int, tied: bool) -> None:
    path = tiny_model(
        tmp_path / "m",
        architecture="phi3",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share},
    )
    check(path)


@pytest.mark.parametrize("window", [4, 17])
def test_windows_and_chunks(tmp_path: Path, check: Callable[..., None], window: int) -> None:
    path = tiny_model(tmp_path / "m", architecture="phi3", sliding_window=window)
    check(path, LONG, max_step_tokens=8, max_rows=1)


@pytest.mark.supports("Models", "Phi-3 with longrope and partial rotation")
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_longrope_past_the_original_context(tmp_path: Path, check: Callable[..., None], share: float) -> None:
    path = tiny_model(
        tmp_path / "m",
        architecture="phi3",
        original_max_position_embeddings=32,
        rope_parameters=longrope(int(16 * share), partial_rotary_factor=share),
    )
    check(path, LONG)


def test_longrope_with_a_length_within_the_original_context(tmp_path: Path, check: Callable[..., None]) -> None:
    path = tiny_model(
        tmp_path / "m", architecture="phi3", original_max_position_embeddings=64, rope_parameters=longrope(16)
    )
    check(path, LONG[:30], max_length=64)


def test_su_is_longrope(tmp_path: Path, edit: Any, check: Callable[..., None]) -> None:
    """The old dialect with its old name."""
    path = tiny_model(
        tmp_path / "m", architecture="phi3", original_max_position_embeddings=32, rope_parameters=longrope(16)
    )
    table = {key: value for key, value in longrope(16).items() if key not in ("rope_type", "rope_theta")}
    edit(
        path,
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling={**table, "type": "su", "original_max_position_embeddings": 32},
    )
    check(path, LONG)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": "half"}},
        {"rope_parameters": longrope(12)},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, edit: Any, change: dict[str, Any]) -> None:
    path = tiny_model(tmp_path / "m", architecture="phi3")
    edit(path, **change)
    with pytest.raises(ConfigError, match=r"attention_bias|partial_rotary_factor|short_factor"):
        Engine(path, device="cpu")
