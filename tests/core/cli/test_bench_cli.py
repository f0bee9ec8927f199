"""`pegboard bench`: it measures what it says, and says what ran."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import hookimpl
from pegboard.benchmark import Prompts, measure_itl, measure_throughput, measure_ttft
from pegboard.cli.main import main
from pegboard.contracts.observer import RequestFinished
from pegboard.errors import ConfigError, RequestFailed

Output = pytest.CaptureFixture[str]


def test_offline(tiny_path: Path, capsys: Output) -> None:
    arguments = ["bench", "offline", "-m", str(tiny_path), "--prompts", "3", "--input", "9", "--output", "5"]
    assert main([*arguments, "--set", "device=cpu", "--set", "threads=1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = data["throughput"]
    assert (found["prompts"], found["input_tokens"], found["output_tokens"]) == (3, 27, 15)
    assert found["seconds"] > 0
    assert found["output_tokens_per_second"] == pytest.approx(15 / found["seconds"])
    assert found["tokens_per_second"] == pytest.approx(42 / found["seconds"])
    used = data["setup"]
    assert (used["dtype"], used["threads"], used["parts"]["quantizer"]) == ("float32", 1, "none")
    assert main([*arguments, "--set", "device=cpu"]) == 0
    text = capsys.readouterr().out
    assert "quantizer none" in text
    assert "output_tokens_per_second" in text


def test_latency(tiny_path: Path, capsys: Output) -> None:
    arguments = ["bench", "latency", "-m", str(tiny_path), "--set", "device=cpu", "--repeats", "2", "--output", "16"]
    arguments += ["--input", "8", "--input", "40", "--batch", "1", "--batch", "3"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["input_tokens"] for row in data["ttft"]] == [8, 40]
    assert all(0 < row["best"] <= row["median"] for row in data["ttft"])
    assert [row["batch"] for row in data["itl"]] == [1, 3]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines[4:]] == ["prompt", "8", "40", "", "batch", "1", "3"]


def test_a_batch_that_cannot_run_at_once_is_an_error(tiny_path: Path, capsys: Output) -> None:
    arguments = ["bench", "latency", "-m", str(tiny_path), "--set", "max_rows=2", "--set", "device=cpu"]
    assert main([*arguments, "--input", "8", "--batch", "3", "--output", "4", "--repeats", "1"]) == 2
    assert "a batch of 3 can't run at once: max_rows is 2" in capsys.readouterr().err


class Counter:
    """(prompt tokens, new tokens, cached tokens) of every request."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    @hookimpl
    def pegboard_request_finished(self, event: RequestFinished) -> None:
        metrics = event.metrics
        self.seen.append((metrics.prompt_tokens, metrics.output_tokens, metrics.cached_tokens))


@pytest.fixture
def counted(make_engine: Callable[..., Any], tiny_path: Path) -> tuple[Any, Counter]:
    counter = Counter()
    return make_engine(tiny_path, device="cpu", max_rows=4, watchers=[counter]), counter


def test_runs_do_the_whole_work(counted: tuple[Any, Counter]) -> None:
    """No prompt is found in the cache, no text ends early, and every repeat is run."""
    engine, counter = counted
    prompts = Prompts(engine, seed=5)
    list(measure_ttft(engine, prompts, [40], repeats=3))
    assert counter.seen == [(40, 1, 0)] * 4
    counter.seen.clear()
    list(measure_itl(engine, prompts, [2], 40, 6, repeats=2))
    assert sorted(counter.seen) == [(40, 8, 0)] * 4 + [(40, 14, 0)] * 4
    counter.seen.clear()
    measure_throughput(engine, prompts, 5, 40, 6)
    assert sorted(counter.seen) == [(40, 2, 0)] + [(40, 6, 0)] * 5


def test_prompts_of_a_seed_are_the_same(counted: tuple[Any, Counter]) -> None:
    engine, _ = counted
    first, again, other = (Prompts(engine, seed).draw(2, 30) for seed in (1, 1, 2))
    assert first == again != other
    assert all(0 <= token < engine.plan.vocab_limit for prompt in first for token in prompt)


def test_failures_are_not_timed(counted: tuple[Any, Counter]) -> None:
    engine, _ = counted
    with pytest.raises(RequestFailed, match="1 of 1 prompts failed"):
        list(measure_ttft(engine, Prompts(engine, 0), [100_000], repeats=1))
    with pytest.raises(ConfigError, match="max_rows is 4"):
        list(measure_itl(engine, Prompts(engine, 0), [1, 5], 8, 4, repeats=1))
