"""The memory plan: what fits is served, what doesn't is refused with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard import (
    ConfigError,
    InvalidRequest,
    Part,
    SamplingParams,
    hookimpl,
    load_config,
    plan_engine,
    survey,
)
from pegboard.contracts.attention import AttentionNeed
from pegboard.contracts.device import DeviceFacts
from pegboard.needs import page_sizes
from pegboard_attention.torch_backend import TorchAttention

#: A page of the tiny model in float32: 16 entries, K and V, 2 heads of 16, 3 layers.
PAGE = 16 * 2 * 2 * 16 * 4 * 3


def test_a_cache_smaller_than_the_context_shortens_what_is_admitted(
    tiny_path: Path, make_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tiny_path, device="cpu", kv_memory=10 * PAGE)
    assert engine.plan.max_length == engine.plan.capacity == 9 * 16
    assert "max_length is 144" in caplog.text
    full = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    assert len(engine.generate([[5] * 44], full)[0].raise_for_error().token_ids) == 100
    with pytest.raises(InvalidRequest, match="145"):
        engine.submit([5] * 45, full)


def test_an_explicit_length_that_the_cache_does_not_hold_is_refused(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_length"):
        plan_engine(tiny_path, device="cpu", kv_memory=10 * PAGE, max_length=145)


class OnlyPagesOf16(TorchAttention):
    @classmethod
    def refusals(cls, need: AttentionNeed, options: Any) -> Sequence[str]:
        return [*super().refusals(need, options), *(["reads pages of 16"] if need.page_size != 16 else [])]


class Plugin:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [Part(role="attention", name="small-pages", factory=OnlyPagesOf16, summary="for a test")]


def test_auto_takes_the_first_page_size_that_attention_serves(
    tiny_path: Path, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config({"model": "m"})
    assert page_sizes(config, DeviceFacts(type="cpu")) == (16,)
    assert page_sizes(config, DeviceFacts(type="cuda")) == (64, 16)
    assert page_sizes(load_config({"model": "m", "page_size": 32}), DeviceFacts(type="cuda")) == (32,)
    assert make_engine(tiny_path, device="cpu").plan.page_size == 16
    monkeypatch.setattr(survey, "page_sizes", lambda config, device: (64, 16))
    for settings, size in (({"attention": "torch"}, 64), ({"attention": "small-pages", "plugins": [Plugin()]}, 16)):
        engine = make_engine(tiny_path, device="cpu", kv_memory=100 * PAGE, **settings)
        assert engine.plan.page_size == size
        assert engine.plan.capacity % size == 0
        assert engine._phases.executor.memory().kv_cache <= 100 * PAGE


def test_the_plan_counts_weights_and_cache(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu", kv_memory=100 * PAGE, max_rows=2)
    held = engine._phases.executor.memory()
    assert engine.plan.memory.weights == held.weights
    assert engine.plan.memory.kv_cache == 100 * PAGE >= held.kv_cache > 90 * PAGE


def test_the_numbers_stand_in_the_refusal(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs .* GiB \(weights .*, a step .*, KV cache .*\), has"):
        plan_engine(tiny_path, device="cpu", max_step_tokens=2**40)
