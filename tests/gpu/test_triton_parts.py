"""The Triton parts in an engine on a CUDA device: chosen by themselves, and as right as the torch parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import SamplingParams
from pegboard.testing.tiny import tiny_model

pytestmark = pytest.mark.gpu

PROMPTS = [[1, 17, 42, 200, 3, 99, 99, 140, 7, 56, 23], [5, 4, 3], list(range(3, 80)), [9] * 40]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def chosen(engine: Any) -> dict[str, str]:
    return {where: part.name for where, part in engine.plan.parts.items()}


@pytest.mark.supports("On a GPU", "FlashDecoding and fused ops in Triton: greedy ids of transformers")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_greedy_ids_in_float32(
    tmp_path: Path, make_engine: Callable[..., Any], architecture: str, page_size: int
) -> None:
    from transformers import AutoModelForCausalLM

    extra = {} if architecture == "llama" else {"head_dim": 16}
    if architecture == "gemma3_text":
        extra["sliding_window"] = 20
    path = tiny_model(tmp_path / "m", architecture=architecture, std=0.4, seed=5, **extra)
    engine = make_engine(path, device="cuda", dtype="float32", page_size=page_size, max_rows=4, kv_memory="64MiB")
    assert chosen(engine)["decode_attention"] == "flash_decoding"
    assert chosen(engine)["ops"] == "triton"
    found = [output.raise_for_error().token_ids for output in engine.generate(PROMPTS, GREEDY)]
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    for prompt, ids in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logprobs_are_those_of_the_torch_parts(tmp_path: Path, make_engine: Callable[..., Any], dtype: str) -> None:
    """One row, whose products are fused, and several."""
    path = tiny_model(tmp_path / "m", std=0.1, seed=5)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    for prompts in (PROMPTS[:1], PROMPTS):
        found = []
        for parts in ({}, {"decode_attention": "torch", "ops": "torch"}):
            engine = make_engine(path, device="cuda", dtype=dtype, max_rows=4, kv_memory="64MiB", **parts)
            outputs = [output.raise_for_error() for output in engine.generate(prompts, sampling)]
            found.append([output.completions[0].logprobs[0].logprob for output in outputs])
            engine.close()
        assert found[0] == pytest.approx(found[1], abs=0.05)
