"""Engines with an eight-bit K/V cache on a CUDA device, with the parts that choose themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import SamplingParams
from pegboard.testing.tiny import tiny_model

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(3, 83)), [1, 17, 42, 200, 3, 99, 99, 140, 7, 56, 23], [9] * 40]


@pytest.mark.supports("On a GPU", "INT8 and FP8 K/V caches")
@pytest.mark.parametrize("kv", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("page_size", ["auto", 16])
def test_logprobs_are_near_those_of_a_full_cache(
    tmp_path: Path, make_engine: Callable[..., Any], architecture: str, kv: str, page_size: Any
) -> None:
    extra = {} if architecture == "llama" else {"head_dim": 16, "sliding_window": 20}
    path = tiny_model(tmp_path / "m", architecture=architecture, std=0.1, seed=5, **extra)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for kv_dtype in ("auto", kv):
        engine = make_engine(
            path,
            device="cuda",
            dtype="bfloat16",
            kv_dtype=kv_dtype,
            page_size=page_size,
            max_rows=4,
            kv_memory="64MiB",
        )
        assert engine.plan.page_size == (64 if page_size == "auto" else page_size)
        assert engine.plan.parts["attention"].name == "flash_attention_2"
        assert engine.plan.parts["decode_attention"].name == "flash_decoding"
        outputs = [output.raise_for_error() for output in engine.generate(PROMPTS, sampling)]
        found.append([output.completions[0].logprobs[0].logprob for output in outputs])
        engine.close()
    assert found[0] == pytest.approx(found[1], abs=0.1)
