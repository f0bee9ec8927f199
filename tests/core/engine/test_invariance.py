"""A request's tokens depend on nothing but the request: not on neighbours, pool, chunks, reuse or policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import RequestOutput, SamplingParams
from pegboard.testing.tiny import tiny_model

NEW = 20
FULL = bool(os.environ.get("PEGBOARD_FULL"))
#: A page of the tiny model: 16 entries, K and V, 2 heads of 16, 3 layers.
PAGE = {"float64": 16 * 2 * 2 * 16 * 8 * 3, "float32": 16 * 2 * 2 * 16 * 4 * 3}


def prompts(count: int) -> list[list[int]]:
    """Ragged, half of them sharing a long beginning."""
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(3, 211, (40,), generator=generator).tolist()
    made = []
    for index in range(count):
        length = 3 + int(torch.randint(0, 45, (1,), generator=generator))
        own = torch.randint(3, 211, (length,), generator=generator).tolist()
        made.append(shared + own if index % 2 else own)
    return made


def params(index: int) -> SamplingParams:
    """Greedy and seeded requests, with and without filters and penalties."""
    common: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True}
    kinds = (
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.0, seed=index, **common),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=index, **common),
        SamplingParams(temperature=1.2, min_p=0.02, seed=index, repetition_penalty=1.2, presence_penalty=0.3, **common),
    )
    return kinds[index % len(kinds)]


def ids(engine: Any, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[tuple[int, ...]]:
    handles = [engine.submit(prompt, sampling) for prompt, sampling in asked]
    outputs: list[RequestOutput] = [handle.result(timeout=120).raise_for_error() for handle in handles]
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose best token stands out (asserted below)."""
    return tiny_model(tmp_path_factory.mktemp("spread") / "m", std=0.4, seed=5)


@pytest.fixture(scope="module")
def alone(spread: Path) -> list[tuple[int, ...]]:
    """Each of 64 requests run by itself in float64: the reference."""
    from pegboard import Engine

    asked = [(prompt, params(i)) for i, prompt in enumerate(prompts(64))]
    with Engine(spread, device="cpu", dtype="float64", max_rows=1, max_length=128) as engine:
        return [ids(engine, [one])[0] for one in asked]


@pytest.fixture(scope="module")
def standing_out(spread: Path) -> list[tuple[list[int], tuple[int, ...]]]:
    """Prompts and what follows them greedily in float32, each by itself, where every best token stands out."""
    from pegboard import Engine

    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=2)
    asked = []
    with Engine(spread, device="cpu", max_rows=1, max_length=128) as reference:
        for prompt in prompts(64 if FULL else 32):
            output = reference.generate([prompt], sampling)[0].raise_for_error()
            gaps = [record.top[0][1] - record.top[1][1] for record in output.completions[0].logprobs or ()]
            if min(gaps) > 1e-2:
                asked.append((prompt, output.token_ids))
    return asked


VARIANTS: dict[str, dict[str, Any]] = {
    "batch-8": {"max_rows": 8},
    "batch-64": {"max_rows": 64},
    "small-pool": {"max_rows": 8, "pool": 12},
    "chunk-1": {"max_rows": 8, "scheduler": {"use": "continuous", "options": {"chunk": 1}}},
    "chunk-8": {"max_rows": 8, "scheduler": {"use": "continuous", "options": {"chunk": 8}}},
    "few-tokens-a-step": {"max_rows": 8, "max_step_tokens": 24},
    "no-reuse": {"max_rows": 8, "cache": {"use": "paged", "options": {"prefix_reuse": False}}},
    "static": {"max_rows": 8, "scheduler": "static"},
    "static-small-pool": {"max_rows": 8, "scheduler": "static", "pool": 12},
    "page-64": {"max_rows": 8, "page_size": 64},
    "ahead-1": {"max_rows": 8, "run_ahead": 1},
    "ahead-2-small-pool": {"max_rows": 8, "run_ahead": 2, "pool": 12},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.supports("Scheduling", "continuous and static batching, chunks, prefix reuse, preemption, running ahead")
def test_float64_ids_are_the_same(spread: Path, alone: Any, make_engine: Callable[..., Any], name: str) -> None:
    settings = dict(VARIANTS[name])
    if "pool" in settings:
        settings["kv_memory"] = settings.pop("pool") * PAGE["float64"]
    engine = make_engine(spread, device="cpu", dtype="float64", max_length=128, **settings)
    count = 64 if name == "batch-64" else 16
    asked = [(prompt, params(i)) for i, prompt in enumerate(prompts(64)[:count])]
    assert ids(engine, asked) == alone[:count]
    # Once more, now that prefixes are warm.
    assert ids(engine, asked) == alone[:count]
    if "pool" in VARIANTS[name]:
        assert engine.stats().preemptions_total > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("name", ["batch-64", "small-pool", "chunk-8", "static", "ahead-1"])
def test_float32_greedy_ids_are_the_same_where_the_best_token_stands_out(
    spread: Path, standing_out: Any, make_engine: Callable[..., Any], name: str
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=2)
    assert len(standing_out) >= 8
    settings = dict(VARIANTS[name])
    if "pool" in settings:
        settings["kv_memory"] = settings.pop("pool") * PAGE["float32"]
    engine = make_engine(spread, device="cpu", max_length=128, **settings)
    for _ in range(2):
        found = ids(engine, [(prompt, sampling) for prompt, _ in standing_out])
        assert found == [expected for _, expected in standing_out]


def test_a_seeded_request_alone_and_beside_others(spread: Path, alone: Any, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(spread, device="cpu", dtype="float64", max_rows=8, max_length=128)
    wanted = (prompts(64)[1], params(1))
    noise = [(prompt, SamplingParams(temperature=1.5, max_tokens=30)) for prompt in prompts(64)[20:27]]
    assert ids(engine, [*noise, wanted])[-1] == alone[1]
    assert ids(engine, [wanted, *noise])[0] == alone[1]


@pytest.mark.supports("Sampling", "seeds")
def test_samples_of_one_request_differ_and_are_reproducible(spread: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(spread, device="cpu", dtype="float64", max_rows=8, max_length=128)
    sampling = SamplingParams(temperature=1.0, seed=7, n=4, max_tokens=NEW, ignore_eos=True)
    first = engine.generate([prompts(64)[1]], sampling)[0].raise_for_error()
    texts = [completion.token_ids for completion in first.completions]
    assert [c.index for c in first.completions] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    small = make_engine(
        spread, device="cpu", dtype="float64", max_rows=2, max_length=128, kv_memory=9 * PAGE["float64"]
    )
    again = small.generate([prompts(64)[1]], sampling)[0].raise_for_error()
    assert [completion.token_ids for completion in again.completions] == texts
