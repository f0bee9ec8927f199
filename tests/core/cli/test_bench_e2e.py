"""`pegboard bench e2e`: every number of the report is of what it says."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine, Part, hookimpl
from pegboard.benchmark import HostWatch, Load, measure_end_to_end
from pegboard.benchmark.end_to_end import mixed_requests
from pegboard.cli.main import main
from pegboard.contracts.observer import RequestFinished, StepDone, StepTimes
from pegboard.contracts.sampler import SampleOutput, SampleRows
from pegboard.errors import ConfigError
from pegboard_sampling.torch_sampler import TorchSampler

Output = pytest.CaptureFixture[str]
SMALL = ["--input", "8", "--input", "20", "--batch", "1", "--batch", "3", "--prompt", "16", "--output", "12"]
SMALL += ["--requests", "5", "--request-input", "4:9", "--request-output", "2:6", "--set", "device=cpu"]


def test_the_report(tiny_path: Path, capsys: Output) -> None:
    arguments = ["bench", "e2e", "--shape", str(tiny_path), *SMALL, "--temperature", "0.8", "--top-k", "20"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["setup"]["model"] == f"random:{tiny_path / 'config.json'}"
    assert data["setup"]["parts"]["checkpoint"] == "random"
    assert data["setup"]["config"]["device"] == "cpu"
    assert {"pegboard", "torch"} <= data["setup"]["versions"].keys()
    assert (data["load"]["temperature"], data["load"]["top_k"], data["load"]["requests"]) == (0.8, 20, 5)
    assert 0 < data["ready"]["constructed"] < data["ready"]["first_token"]
    assert [row["input_tokens"] for row in data["ttft"]] == [8, 20]
    assert [row["batch"] for row in data["itl"]] == [1, 3]
    assert [row["rows"] for row in data["host"]] == [1, 3]
    for row in data["host"]:
        assert row["steps"] >= 2 * (8 + 20) - 2 * row["rows"]
        assert 0 < row["median"] <= row["p90"]
        assert 0 < row["executor"] < row["launch"] + row["retire"]
    assert data["throughput"]["prompts"] == 5
    assert 5 * 4 <= data["throughput"]["input_tokens"] <= 5 * 9
    assert 5 * 2 <= data["throughput"]["output_tokens"] <= 5 * 6
    same = ("prompts", "input_tokens", "output_tokens")
    assert [data["throughput"][field] for field in same] == [data["throughput_again"][field] for field in same]
    assert data["profiles"] == []
    assert data["repeated"] == {"prompts": 3, "tokens": 36, "match": 1.0}
    assert data["memory"]["device"] is None
    assert 10e6 < data["memory"]["host"] < 100e9
    assert main([*arguments, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["throughput_again"] is None
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    begins = [line.split()[0] if line else "" for line in lines]
    for word in ("constructed", "first", "peak", "same", "prompt", "batch", "rows", "seconds"):
        assert word in begins
    assert [begins[begins.index("rows") + row] for row in (1, 2)] == ["1", "3"]


def test_profiles(tiny_path: Path, tmp_path: Path, capsys: Output) -> None:
    arguments = ["bench", "e2e", "-m", str(tiny_path), *SMALL, "--profile", str(tmp_path / "traces")]
    assert main([*arguments, "--json"]) == 0
    profiles = json.loads(capsys.readouterr().out)["profiles"]
    assert [(p["batch"], p["input"], p["output"]) for p in profiles] == [
        (1, 8, 1),
        (1, 20, 1),
        (1, 16, 12),
        (3, 16, 12),
    ]
    for profile in profiles:
        assert gzip.decompress(Path(profile["trace"]).read_bytes()).lstrip().startswith(b"{")
        names = {kernel["name"]: kernel for kernel in profile["kernels"]}
        layers = names["aten::index_select"]
        assert layers["count"] > 0
        assert 0 < layers["seconds"] < profile["seconds"]
        assert profile["busy"] == pytest.approx(sum(kernel["seconds"] for kernel in profile["kernels"]))
    (tmp_path / "file").write_text("")
    assert main([*arguments[:-1], str(tmp_path / "file" / "folder")]) == 2
    assert "the profile can't be written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--request-input", "9:4"], "--request-input is '9:4', must be LOW:HIGH"),
        (["--request-output", "0:4"], "--request-output is '0:4'"),
        (["--request-output", "4"], "--request-output is '4'"),
        (["--batch", "65"], "a batch of 65 can't run at once: max_rows is 64"),
        (["--shape", "llama-8b"], "--shape and --model exclude each other"),
    ],
)
def test_what_cannot_be_run_is_an_error(tiny_path: Path, capsys: Output, arguments: list[str], words: str) -> None:
    assert main(["bench", "e2e", "-m", str(tiny_path), *SMALL, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_mixed_requests_are_those_of_the_seed() -> None:
    load = Load(requests=200, request_input=(3, 5), request_output=(2, 4), temperature=0.7, top_k=3, top_p=0.9)
    made = mixed_requests(load, 20_000)
    assert made == mixed_requests(load, 20_000)
    assert {len(request.prompt) for request in made} == {3, 4, 5}
    assert {request.sampling.max_tokens for request in made} == {2, 3, 4}
    ids = {id for request in made for id in request.prompt}
    assert max(ids) < 10_000 < max(ids) + 200
    assert all(request.sampling.ignore_eos for request in made)
    assert {(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in made} == {(0.7, 3, 0.9)}
    assert max(id for request in mixed_requests(load, 50) for id in request.prompt) == 49


def tiny_load(**fields: Any) -> Load:
    small: dict[str, Any] = {"ttft_inputs": (4,), "batches": (2,), "prompt": 33, "output": 10, "requests": 2}
    return Load(**small | {"request_input": (4, 4), "request_output": (2, 2)} | fields)


def test_the_whole_work_is_done(tiny_path: Path) -> None:
    """Nothing is found in the prefix cache, in the repeated run neither, and every length is the one asked for."""
    seen: list[tuple[int, int, int]] = []

    class Counter:
        @hookimpl
        def pegboard_request_finished(self, event: RequestFinished) -> None:
            metrics = event.metrics
            seen.append((metrics.prompt_tokens, metrics.output_tokens, metrics.cached_tokens))

    def make(watchers: Sequence[object]) -> Engine:
        return Engine(tiny_path, device="cpu", watchers=[*watchers, Counter()])

    measure_end_to_end(make, tiny_load())
    ready, ttft, mixed = [(16, 1, 0)], [(4, 1, 0)] * 3, [(4, 2, 0)] * 4  # the mixed ones once more
    assert sorted(seen) == sorted([*ready, *ttft, *[(33, 8, 0), (33, 18, 0)] * 4, *mixed, *[(33, 10, 0)] * 4])


def test_tokens_that_differ_when_repeated_are_seen(tiny_path: Path) -> None:
    class Fickle(TorchSampler):
        def sample(self, logits: torch.Tensor, rows: SampleRows) -> SampleOutput:
            super().sample(logits, rows)
            return SampleOutput(ids=torch.randint(3, 211, (logits.shape[0],)), logprobs=None)

    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            return [Part(role="sampler", name="fickle", factory=Fickle, summary="for a test")]

    def make(watchers: Sequence[object]) -> Engine:
        return Engine(tiny_path, device="cpu", watchers=watchers, plugins=[Plugin()], sampler="fickle")

    assert measure_end_to_end(make, tiny_load()).repeated.match < 0.5


def step(rows: int, seconds: float, executor: float | None = 0.0) -> StepDone:
    times = StepTimes(schedule=seconds, launch=1.0, retire=0.5, commit=0.0, emit=0.0, executor=executor)
    return StepDone(step=1, rows=rows, seconds=2.0, waiting=0, running=rows, times=times)


def test_median_and_p90_are_of_the_steps_with_so_many_rows() -> None:
    watch = HostWatch()
    for count in range(1, 11):
        watch.pegboard_step_done(step(2, float(count)))
    watch.pegboard_step_done(step(3, 100.0, None))
    found = watch.of(2)
    assert found is not None
    assert (found.steps, found.median, found.p90, found.launch) == (10, 5.0, 9.0, 1.0)
    untold = watch.of(3)
    assert untold is not None
    assert (untold.median, untold.p90, untold.executor, untold.schedule) == (None, None, None, 100.0)
    assert watch.of(4) is None
    watch.clear()
    assert watch.of(2) is None


def test_a_batch_that_is_too_large_is_refused_before_anything_is_timed(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_rows is 1"):
        measure_end_to_end(lambda watchers: Engine(tiny_path, device="cpu", max_rows=1, watchers=watchers), tiny_load())
