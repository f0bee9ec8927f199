"""Mixtral and Qwen3-MoE against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import ConfigError, Engine, SamplingParams
from pegboard.testing.tiny import tiny_model

LONG = torch.randint(3, 211, (50,), generator=torch.Generator().manual_seed(2)).tolist()
QWEN: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.supports("Models", "Mixtral")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("experts", "per_token", "tied"), [(4, 2, False), (4, 4, True), (7, 1, False)])
def test_mixtral(
    tmp_path: Path, check: Callable[..., None], experts: int, per_token: int, tied: bool, window: int | None
) -> None:
    path = tiny_model(
        tmp_path / "m",
        architecture="mixtral",
        num_local_experts=experts,
        num_experts_per_tok=per_token,
        tie_word_embeddings=tied,
        sliding_window=window,
    )
    check(path, LONG, max_step_tokens=16, max_rows=1)


@pytest.mark.supports("Models", "Qwen3-MoE")
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
def test_qwen3_moe(tmp_path: Path, check: Callable[..., None], heads: int, kv_heads: int, normalised: bool) -> None:
    path = tiny_model(
        tmp_path / "m", **QWEN, num_attention_heads=heads, num_key_value_heads=kv_heads, norm_topk_prob=normalised
    )
    check(path, LONG, max_step_tokens=16, max_rows=1)


@pytest.mark.parametrize("which", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2]}], ids=str)
def test_experts_in_some_layers(tmp_path: Path, check: Callable[..., None], which: dict[str, Any]) -> None:
    check(tiny_model(tmp_path / "m", **QWEN, **which))


def test_a_window_over_all_layers(tmp_path: Path, check: Callable[..., None]) -> None:
    check(tiny_model(tmp_path / "m", **QWEN, use_sliding_window=True, sliding_window=4), LONG)


def test_rows_of_a_step_find_their_own_experts(
    tmp_path: Path, oracle: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    path = tiny_model(tmp_path / "m", **QWEN)
    prompts = [LONG[:5], LONG[5:30], LONG[30:], LONG]
    engine = make_engine(path, device="cpu", max_rows=3, max_step_tokens=32)
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.raise_for_error().token_ids == tuple(oracle(path, prompt, 16)[1])


def test_more_experts_a_token_than_there_are(tmp_path: Path, edit: Any) -> None:
    path = tiny_model(tmp_path / "m", **QWEN)
    edit(path, num_experts_per_tok=7)
    with pytest.raises(ConfigError, match="num_experts_per_tok is 7, of 6 experts"):
        Engine(path, device="cpu")
