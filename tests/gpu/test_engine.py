"""The torch parts on a CUDA device, the device one step ahead of the host."""

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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "m", std=0.4, seed=5)


def oracle(path: Path, new: int) -> list[tuple[int, ...]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(new):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(tuple(ids[len(prompt) :]))
    return found


@pytest.mark.supports("On a GPU", "greedy ids of transformers, host up to two steps behind")
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_greedy_ids_in_float64(path: Path, make_engine: Callable[..., Any], ahead: int) -> None:
    engine = make_engine(path, device="cuda", dtype="float64", run_ahead=ahead, max_rows=4, kv_memory="64MiB")
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    assert [o.raise_for_error().token_ids for o in engine.generate(PROMPTS, sampling)] == oracle(path, 24)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_seeded_ids_do_not_depend_on_running_ahead(path: Path, make_engine: Callable[..., Any], dtype: str) -> None:
    found = []
    for ahead in (0, 2):
        engine = make_engine(path, device="cuda", dtype=dtype, run_ahead=ahead, max_rows=1, kv_memory="64MiB")
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24)
        found.append([o.raise_for_error().token_ids for o in engine.generate(PROMPTS, sampling)])
    assert found[0] == found[1]


@pytest.mark.supports("On a GPU", "close() gives device memory back")
def test_close_gives_device_memory_back(path: Path, make_engine: Callable[..., Any]) -> None:
    held = []
    for _ in range(3):
        engine = make_engine(path, device="cuda", max_rows=4, kv_memory="256MiB")
        engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
        engine.close()
        held.append(torch.cuda.memory_allocated())
    assert held[0] == held[1] == held[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(path, device="cuda:1", dtype="float64", run_ahead=1, max_rows=4, kv_memory="64MiB")
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    assert torch.cuda.current_device() == 0
    assert [o.raise_for_error().token_ids for o in engine.generate(PROMPTS, sampling)] == oracle(path, 24)


@pytest.mark.supports("On a GPU", "Mistral, Qwen3 and Gemma 3 models")
@pytest.mark.parametrize("architecture", ["mistral", "qwen3", "gemma3_text"])
def test_other_architectures(tmp_path: Path, make_engine: Callable[..., Any], architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    extra = {"head_dim": 16, "sliding_window": 4} if architecture != "qwen3" else {"head_dim": 16}
    model = tiny_model(tmp_path / "m", architecture=architecture, std=0.4, seed=5, **extra)
    oracle_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    ids = list(PROMPTS[0])
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(oracle_model(torch.tensor([ids])).logits[0, -1].argmax()))
    engine = make_engine(model, device="cuda", dtype="float64", max_rows=2, kv_memory="64MiB")
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert engine.generate([PROMPTS[0]], sampling)[0].raise_for_error().token_ids == tuple(ids[len(PROMPTS[0]) :])
