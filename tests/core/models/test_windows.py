"""Cache groups with a window beside full ones, end to end: rows, prefix reuse, forks, preemption, running ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import SamplingParams
from pegboard.testing.tiny import tiny_model

NEW = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
#: More than a page of 16, so that a window begins inside of one and spans two or three.
WINDOW = 20


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 211, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = ids(70, 0)
PROMPTS = [SHARED + ids(9, 1), ids(5, 2), SHARED + ids(30, 3), ids(33, 4), SHARED[:48], ids(100, 5), SHARED + ids(9, 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("gemma3") / "m",
        architecture="gemma3_text",
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=256,
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    """By transformers, one prompt after the other, without its cache."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for prompt in PROMPTS:
            text = list(prompt)
            for _ in range(NEW):
                text.append(int(oracle(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            found.append(tuple(text[len(prompt) :]))
    return found


#: A page of all layers: 16 entries, K and V, 2 heads of 16, float32.
PAGE = 16 * 2 * 2 * 16 * 4 * 3

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_step_tokens": 24, "max_rows": 4},
    "ahead": {"run_ahead": 1, "max_rows": 3},
    "no-reuse": {"cache": {"use": "paged", "options": {"prefix_reuse": False}}},
    "preempted": {"kv_memory": 12 * PAGE, "max_length": 160, "max_step_tokens": 64, "max_rows": 8},
    "static": {"scheduler": "static", "max_rows": 4},
}


@pytest.mark.supports("Models", "window layers with prefix reuse, chunks, forks, preemption and running ahead")
@pytest.mark.parametrize("name", SETTINGS)
def test_many_rows(
    model: Path, expected: Sequence[tuple[int, ...]], make_engine: Callable[..., Any], name: str
) -> None:
    engine = make_engine(model, device="cpu", **SETTINGS[name])
    for _ in range(2):  # the second time over what the first left in the cache
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.raise_for_error().token_ids for output in outputs] == list(expected)
        assert any(output.metrics.preemptions for output in outputs) == (name == "preempted")


def test_forks(model: Path, expected: Sequence[tuple[int, ...]], make_engine: Callable[..., Any]) -> None:
    """n > 1: the copies begin inside of a window that is shared."""
    engine = make_engine(model, device="cpu", max_step_tokens=32)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, n=3)
    outputs = engine.generate(PROMPTS, sampling)
    for output, tokens in zip(outputs, expected, strict=True):
        output.raise_for_error()
        assert [completion.token_ids for completion in output.completions] == [tokens] * 3


def test_layers_with_a_window_are_a_group_that_needs_fewer_pages(model: Path) -> None:
    from pegboard import plan_engine

    plan = plan_engine(model, device="cpu", max_rows=4, max_length=256)
    by_kind = {group.kind: (group, pages) for group, pages in zip(plan.groups, plan.pages, strict=True)}
    assert by_kind["window"][0].layers == (0, 2)
    assert by_kind["window"][0].window == WINDOW
    assert by_kind["full"][0].layers == (1,)
    assert by_kind["window"][1] < by_kind["full"][1]
