"""Steps as CUDA graphs: the same bits as kernel by kernel, with whatever parts, and no waiting on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pegboard import Part, SamplingParams, hookimpl
from pegboard.contracts.sampler import SampleOutput, SampleRows
from pegboard.request import Request
from pegboard.testing.tiny import tiny_model
from pegboard_attention.flash_decoding import FlashDecoding
from pegboard_sampling.torch_sampler import TorchSampler

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_rows": 12,
    "max_step_tokens": 96,
    "kv_memory": "64MiB",
    "page_size": 64,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "m", std=0.4, seed=5, head_dim=64)


def requests(count: int, seed: int = 3) -> list[Request]:
    random, found = Random(seed), []
    for index in range(count):
        sampling = SamplingParams(
            temperature=random.choice([0.0, 0.8, 1.1]),
            top_k=random.choice([0, 5, 40]),
            top_p=random.choice([1.0, 0.9]),
            repetition_penalty=random.choice([1.0, 1.0, 1.2]),
            logprobs=random.choice([None, None, 2]),
            seed=index,
            max_tokens=random.randint(1, 40),
            ignore_eos=True,
        )
        prompt = [random.randrange(3, 200) for _ in range(random.choice([1, 2, 17, 64, 150]))]
        found.append(Request(prompt=prompt, sampling=sampling))
    return found


def told(outputs: list[Any]) -> list[Any]:
    return [(o.raise_for_error().token_ids, [p.logprob for p in o.completions[0].logprobs or ()]) for o in outputs]


def graphs_of(engine: Any) -> int:
    recordings = engine._phases.executor._runner._recordings
    return 0 if recordings is None else len(recordings)


@pytest.mark.supports("On a GPU", "steps as CUDA graphs, the bits of kernels launched one by one")
def test_the_same_bits_as_kernel_by_kernel(path: Path, make_engine: Callable[..., Any]) -> None:
    """One request after another, so that batches are alike; the second turn is all replays."""
    found = []
    for recorded in (False, True):
        engine = make_engine(path, cuda_graphs=recorded, **SETTINGS)
        turns = []
        for salt in "abc":
            outputs = [engine.generate(Request(prompt=r.prompt, sampling=r.sampling, salt=salt)) for r in requests(12)]
            turns.append(told(outputs))
        assert turns[0] == turns[1] == turns[2]
        assert (graphs_of(engine) > 0) == recorded
        found.append(turns[0])
    assert found[0] == found[1]


@pytest.mark.supports("On a GPU", "batch-invariant results, whatever runs beside")
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_mixed_traffic_in_batch_invariant_parts(path: Path, make_engine: Callable[..., Any], ahead: int) -> None:
    """In float32 the tiny model's choices are clear enough that padding and neighbours don't decide them."""
    settings = SETTINGS | {"dtype": "float32", "run_ahead": ahead}
    expected = told(make_engine(path, cuda_graphs=False, **settings | {"run_ahead": 0}).generate(requests(40)))
    engine = make_engine(path, **settings)
    for salt in "ab":
        again = engine.generate([Request(prompt=r.prompt, sampling=r.sampling, salt=salt) for r in requests(40)])
        assert [ids for ids, _ in told(again)] == [ids for ids, _ in expected]


class FirstOfAll(TorchSampler):
    """A third party's: greedy, whatever is asked, and captured."""

    capturable = True

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> SampleOutput:
        return SampleOutput(ids=logits.argmax(-1))


class Foreign(FlashDecoding):
    """A third party's, by another name."""


class Waits(FlashDecoding):
    """Says that it can be captured, and cannot."""

    def plan(self, rows: Any, layer: Any, workspace: Any) -> Any:
        assert rows.kv_len.sum().item() >= 0
        return super().plan(rows, layer, workspace)


class Plugin:
    def __init__(self, attention: type, sampler: type = TorchSampler) -> None:
        self._parts = [("attention", attention), ("sampler", sampler)]

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [Part(role=role, name="foreign", factory=part, summary="") for role, part in self._parts]  # type: ignore[arg-type]


@pytest.mark.supports("On a GPU", "third-party attention and samplers in CUDA graphs")
def test_third_party_parts_are_captured_and_run_ahead(path: Path, make_engine: Callable[..., Any]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [[5, 6, 7, 8 + i] for i in range(5)]
    expected = [o.token_ids for o in make_engine(path, **SETTINGS).generate(prompts, greedy)]
    engine = make_engine(
        path, plugins=[Plugin(Foreign, FirstOfAll)], decode_attention="foreign", sampler="foreign", **SETTINGS
    )
    for _ in range(2):
        assert [o.raise_for_error().token_ids for o in engine.generate(prompts, greedy)] == expected
    assert graphs_of(engine) > 0


def test_a_part_that_can_not_be_captured_after_all(path: Path, make_engine: Callable[..., Any], caplog: Any) -> None:
    """It is launched kernel by kernel, and a warning says so."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = make_engine(path, **SETTINGS).generate([[5, 6, 7]], greedy)[0].token_ids
    engine = make_engine(path, plugins=[Plugin(Waits)], decode_attention="foreign", **SETTINGS)
    assert engine.generate([[5, 6, 7]], greedy)[0].raise_for_error().token_ids == expected
    assert "can't be recorded as a CUDA graph" in caplog.text
    assert engine.generate([[5, 6, 7]], greedy)[0].raise_for_error().token_ids == expected


@pytest.mark.supports("On a GPU", "no kernel compiles while it serves")
def test_nothing_compiles_while_it_serves(
    path: Path, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    engine = make_engine(path, **SETTINGS)
    runner = engine._phases.executor._runner
    end = time.monotonic() + 120
    while runner._compilation is not None and time.monotonic() < end:
        engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=2))
        time.sleep(0.1)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_rest: compiled.append(src.name))
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=2, top_k=20, top_p=0.9, max_tokens=25, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=3, top_p=0.8, max_tokens=9, ignore_eos=True),
    ]
    random = Random(4)
    prompts = [[random.randrange(3, 200) for _ in range(random.choice([1, 2, 17, 64, 150]))] for _ in range(30)]
    engine.generate([Request(prompt=p, sampling=sampling[i % 4]) for i, p in enumerate(prompts)])
    assert compiled == []


def test_an_engine_that_waits_for_its_first_request_records(
    path: Path, make_engine: Callable[..., Any], caplog: Any
) -> None:
    """By then all is compiled, and the first step might be recorded in a thread that has launched nothing yet."""
    engine = make_engine(path, **SETTINGS)
    kernels = engine._phases.executor._runner._compilation._mode.kernels.values()
    end = time.monotonic() + 120
    while not all(kernel.future is not None and kernel.future.done() for kernel in kernels):
        assert time.monotonic() < end
        time.sleep(0.1)
    for salt in "ab":
        engine.generate([Request(prompt=r.prompt, sampling=r.sampling, salt=salt) for r in requests(8)])
    assert graphs_of(engine) > 0
    assert "can't be recorded" not in caplog.text


def test_a_recording_that_breaks_off_leaves_the_others_alone(path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(path, **SETTINGS)
    recordings = engine._phases.executor._runner._recordings
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        numbers = torch.zeros(4, device="cuda")
        for _ in range(4):
            recordings.run(("waits",), lambda: numbers.sum().item())
        for _ in range(3):
            found = recordings.run(("adds",), lambda: numbers.add_(1).clone())
        assert len(recordings) == 1
        assert found.tolist() == [3.0] * 4


@pytest.mark.supports("On a GPU", "two engines on one device")
def test_two_engines_record_side_by_side(path: Path, make_engine: Callable[..., Any]) -> None:
    expected = told(make_engine(path, cuda_graphs=False, **SETTINGS | {"dtype": "float32"}).generate(requests(16)))
    engines = [make_engine(path, **SETTINGS | {"dtype": "float32"}) for _ in range(2)]
    found: list[Any] = [None, None]

    def work(index: int) -> None:
        for salt in "abc":
            asked = [Request(prompt=r.prompt, sampling=r.sampling, salt=salt) for r in requests(16)]
            found[index] = told(engines[index].generate(asked))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[ids for ids, _ in each] for each in found] == [[ids for ids, _ in expected]] * 2


def test_memory_comes_back(path: Path, make_engine: Callable[..., Any]) -> None:
    held = []
    for _ in range(3):
        engine = make_engine(path, **SETTINGS)
        engine.generate(requests(20))
        engine.close()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert held[1] == held[2]


@pytest.mark.supports("On a GPU", "no synchronisation on the step path")
def test_nothing_waits_on_the_step_path(path: Path, make_engine: Callable[..., Any]) -> None:
    """torch raises at whatever synchronises; only events of retired steps are waited for."""
    engine = make_engine(path, **SETTINGS)
    engine.generate(requests(24))
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = engine.generate([Request(prompt=r.prompt, sampling=r.sampling, salt="again") for r in requests(24)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(output.error is None for output in again)
