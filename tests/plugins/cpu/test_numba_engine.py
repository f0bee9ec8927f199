"""Engines on the compiled parts, against torch's parts in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from pegboard import Registry, SamplingParams
from pegboard.testing import tiny_model
from pegboard_cpu import manifest

PROMPTS = [[3 + (7 * i * j) % 190 for j in range(length)] for i, length in enumerate((1, 40, 5, 17, 2, 90), start=1)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TORCH = {"ops": "torch", "attention": "torch", "decode_attention": "torch", "dtype": "float64"}


@pytest.fixture(scope="module")
def plugins() -> list[Any]:
    """The manifest, unless it is installed."""
    return [] if any(entry.part.name == "numba" for entry in Registry.discover().parts("ops")) else [manifest]


@pytest.mark.supports("Numbers", "float32 on a CPU through compiled kernels (pip install 'pegboard[cpu]')")
@pytest.mark.parametrize(
    ("architecture", "facts"),
    [
        ("llama", {"head_dim": 64}),
        ("mistral", {"head_dim": 64, "sliding_window": 24}),
        ("qwen3", {"head_dim": 64, "hidden_size": 72}),
        ("gemma3_text", {"head_dim": 64, "sliding_window": 24, "query_pre_attn_scalar": 64}),
    ],
)
def test_auto_takes_them_and_the_ids_are_float64_s(
    architecture: str,
    facts: dict[str, Any],
    plugins: list[Any],
    tmp_path: Path,
    make_engine: Callable[..., Any],
) -> None:
    path = tiny_model(tmp_path / "model", architecture=architecture, **facts)
    settings: dict[str, Any] = {"device": "cpu", "max_rows": 4, "max_length": 256, "max_step_tokens": 32}
    engine = make_engine(path, plugins=plugins, quantizer={"use": "none"}, **settings)
    chosen = {role: engine.plan.parts[role].name for role in ("ops", "attention", "decode_attention")}
    assert chosen == {"ops": "numba", "attention": "numba", "decode_attention": "numba"}
    found = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    exact = make_engine(path, **TORCH, **settings)
    assert found == [output.token_ids for output in exact.generate(PROMPTS, GREEDY)]


def test_two_engines_step_in_two_threads(plugins: list[Any], tmp_path: Path, make_engine: Callable[..., Any]) -> None:
    path = tiny_model(tmp_path / "model", head_dim=64)
    settings: dict[str, Any] = {"device": "cpu", "max_rows": 4, "max_length": 256, "plugins": plugins, "threads": 2}
    engines = [make_engine(path, **settings) for _ in range(2)]
    alone = [output.token_ids for output in engines[0].generate(PROMPTS, GREEDY)]
    handles = [[engine.submit(prompt, GREEDY) for prompt in PROMPTS] for engine in engines]
    for asked in handles:
        assert [handle.result(timeout=60).token_ids for handle in asked] == alone
