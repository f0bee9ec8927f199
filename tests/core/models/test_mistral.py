"""Mistral against transformers, with a window over all layers and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import ConfigError, Engine
from pegboard.testing.tiny import tiny_model

LONG = torch.randint(3, 211, (50,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.supports("Models", "Mistral, with a window or without")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 4, 16), (4, 1, 24), (6, 2, 12)])
@pytest.mark.parametrize("window", [None, 4])
def test_heads(
    tmp_path: Path,
    check: Callable[..., None],
    window: int | None,
    heads: int,
    kv_heads: int,
    head_size: int,
    tied: bool,
) -> None:
    path = tiny_model(
        tmp_path / "m",
        architecture="mistral",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        hidden_size=72 if heads == 6 else 64,
        tie_word_embeddings=tied,
        sliding_window=window,
    )
    check(path)


@pytest.mark.parametrize("window", [1, 4, 17])
@pytest.mark.parametrize("chunk", [3, 16])
def test_windows_and_chunks(tmp_path: Path, check: Callable[..., None], window: int, chunk: int) -> None:
    """Prompts longer than the window and than a step; pages fall out of the window in prefill and in decode."""
    path = tiny_model(tmp_path / "m", architecture="mistral", sliding_window=window)
    check(path, LONG, max_step_tokens=chunk, max_rows=1)


def test_a_window_that_is_absent_is_4096(tmp_path: Path) -> None:
    from pegboard.models.mistral import MistralConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = {**sizes, "vocab_size": 211, "num_key_value_heads": 2}
    assert MistralConfig.read(config).window == 4096
    assert MistralConfig.read({**config, "sliding_window": None}).window is None


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"partial_rotary_factor": 0.5},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"final_logit_softcapping": 30.0},
        {"sliding_window": 0},
    ],
    ids=str,
)
def test_what_would_change_the_result_is_refused_by_name(tmp_path: Path, edit: Any, change: dict[str, Any]) -> None:
    path = tiny_model(tmp_path / "m", architecture="mistral")
    edit(path, **change)
    with pytest.raises(ConfigError, match=next(iter(change))):
        Engine(path, device="cpu")
