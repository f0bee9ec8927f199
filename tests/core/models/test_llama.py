"""Llama against transformers: logits within 1e-4 and 32 greedy ids, on random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import SamplingParams
from pegboard.testing.tiny import tiny_model


@pytest.mark.supports("Models", "Llama (any head ratio and head size, tied and untied)")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [(4, 4, 16), (4, 2, 16), (4, 1, 16), (6, 2, 12), (14, 2, 8), (4, 2, 32), (4, 2, 24)],
)
def test_heads(
    tmp_path: Path, check: Callable[..., None], heads: int, kv_heads: int, head_size: int, tied: bool
) -> None:
    hidden = {6: 72, 14: 112}.get(heads, 64)
    path = tiny_model(
        tmp_path / "m",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        hidden_size=hidden,
        tie_word_embeddings=tied,
    )
    check(path)


@pytest.mark.supports("Models", "Llama with biases")
def test_biases(tmp_path: Path, check: Callable[..., None]) -> None:
    check(tiny_model(tmp_path / "m", attention_bias=True, mlp_bias=True))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
@pytest.mark.supports("Models", "Llama with linear and llama3 rope scaling")
def test_rope_scaling(tmp_path: Path, check: Callable[..., None], rope: dict[str, Any]) -> None:
    check(tiny_model(tmp_path / "m", rope_parameters={"rope_theta": 5000.0, **rope}))


def test_both_rope_dialects_mean_the_same() -> None:
    from pegboard.models.rope import rope_parameters

    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert rope_parameters(old) == rope_parameters(new)


@pytest.mark.supports("Files", "safetensors, sharded with an index")
def test_sharded_file(tmp_path: Path, check: Callable[..., None]) -> None:
    path = tiny_model(tmp_path / "m", shard_size="50KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    check(path)


@pytest.mark.supports("Numbers", "bfloat16 checkpoints run in float32 on CPU")
def test_bfloat16_file_runs_in_float32_on_cpu(tmp_path: Path, check: Callable[..., None]) -> None:
    check(tiny_model(tmp_path / "m", dtype="bfloat16"))


@pytest.mark.supports("Scheduling", "prompts longer than a step")
def test_long_prompt_crosses_pages_and_chunks(
    tmp_path: Path, oracle: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    path = tiny_model(tmp_path / "m")
    prompt = torch.randint(3, 211, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    _, ids = oracle(path, prompt, 16)
    engine = make_engine(path, device="cpu", max_step_tokens=64)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    assert engine.generate([prompt], sampling)[0].token_ids == tuple(ids)
