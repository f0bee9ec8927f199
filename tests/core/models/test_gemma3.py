"""Gemma 3's text model against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import ConfigError, Engine
from pegboard.testing.tiny import tiny_model

LONG = torch.randint(3, 211, (50,), generator=torch.Generator().manual_seed(2)).tolist()
SHAPE: dict[str, Any] = {
    "architecture": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@pytest.mark.supports("Models", "Gemma 3, text only")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 4, 16), (4, 2, 24), (4, 1, 32)])
def test_heads(
    tmp_path: Path, check: Callable[..., None], heads: int, kv_heads: int, head_size: int, tied: bool
) -> None:
    made = {
        **SHAPE,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "tie_word_embeddings": tied,
    }
    check(tiny_model(tmp_path / "m", **made))


@pytest.mark.parametrize("window", [1, 4, 17])
@pytest.mark.parametrize("chunk", [3, 16])
def test_windows_and_chunks(tmp_path: Path, check: Callable[..., None], window: int, chunk: int) -> None:
    check(tiny_model(tmp_path / "m", **SHAPE | {"sliding_window": window}), LONG, max_step_tokens=chunk, max_rows=1)


def test_rope_by_kind_of_layer(tmp_path: Path, check: Callable[..., None]) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    check(tiny_model(tmp_path / "m", **SHAPE | {"rope_parameters": ropes}), LONG)


def test_the_old_dialect(tmp_path: Path, edit: Any, check: Callable[..., None]) -> None:
    """As the published checkpoints say it: windows by a pattern, two bases, a scaling for full layers only."""
    path = tiny_model(tmp_path / "m", **SHAPE)
    edit(
        path,
        layer_types=None,
        sliding_window_pattern=2,
        rope_parameters=None,
        rope_theta=5e4,
        rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    check(path, LONG)


def test_defaults(tmp_path: Path, edit: Any, check: Callable[..., None]) -> None:
    """Every sixth layer sees all, bases 1e6 and 1e4."""
    path = tiny_model(tmp_path / "m", **SHAPE | {"num_hidden_layers": 7, "layer_types": None})
    edit(path, layer_types=None, rope_parameters=None, sliding_window_pattern=None)
    check(path, LONG)


def test_softcap_of_the_logits_and_biases(tmp_path: Path, check: Callable[..., None]) -> None:
    check(tiny_model(tmp_path / "m", **SHAPE, final_logit_softcapping=5.0, attention_bias=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_embedding_is_scaled_as_transformers_does(dtype: torch.dtype) -> None:
    """By the square root of the hidden size as the weights' dtype holds it."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    from pegboard.models.layout import rounded

    oracle = Gemma3TextScaledWordEmbedding(32, 112, 0, embed_scale=112**0.5).to(dtype)
    table = oracle.weight.data
    assert torch.equal(table * rounded(112**0.5, dtype), oracle(torch.arange(32)))


@pytest.mark.parametrize(
    "change",
    [
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"text_config": {"hidden_size": 64}},
        {"mlp_bias": True},
        {"hidden_activation": "relu6"},
        {"sliding_window": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"full_attention": 5}},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, edit: Any, change: dict[str, Any]) -> None:
    path = tiny_model(tmp_path / "m", **SHAPE)
    edit(path, keep_null=True, **change)
    with pytest.raises(ConfigError, match=next(iter(change)) + "|relu6|rope type '5'"):
        Engine(path, device="cpu")


def test_the_nested_config_of_the_multimodal_model(tmp_path: Path, edit: Any) -> None:
    path = tiny_model(tmp_path / "m", **SHAPE)
    edit(path, architectures=["Gemma3ForConditionalGeneration"])
    with pytest.raises(ConfigError, match=r"Gemma3ForConditionalGeneration(.|\n)*Gemma3ForCausalLM"):
        Engine(path, device="cpu")
