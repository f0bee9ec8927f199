"""Beams beside other requests: nobody feels them, they end cleanly however they end, and nothing stays held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pegboard import Engine, InvalidRequest, RequestOutput, SamplingParams
from pegboard.testing import Faults, isolated_engine

BEAMS = SamplingParams(num_beams=4, n=2, max_tokens=16, ignore_eos=True)
#: Bytes of a page of the tiny model: 16 entries, K and V, 2 heads of 16, 3 layers, float32.
PAGE = 16 * 2 * 2 * 16 * 4 * 3


def prompt(index: int, length: int = 20) -> list[int]:
    return [(7 * index + 3 * place) % 200 + 3 for place in range(length)]


def told(output: RequestOutput) -> list[tuple[tuple[int, ...], float | None]]:
    assert output.error is None, output.error
    return [(c.token_ids, None if c.score is None else round(c.score, 3)) for c in output.completions]


def empty(engine: Engine) -> None:
    """Every page and slot is back."""
    scheduler = engine._phases.scheduler
    with engine._phases.lock:
        scheduler.check_integrity()
        assert not scheduler.has_work()
        assert scheduler.inner.ledger.cache.stats().held == 0


@pytest.fixture(scope="module")
def alone(tiny_path: Path) -> list[list[tuple[tuple[int, ...], float | None]]]:
    with Engine(tiny_path, device="cpu", max_rows=8) as engine:
        return [told(engine.generate([prompt(index)], BEAMS)[0]) for index in range(4)]


@pytest.mark.supports("Sampling", "beams of several requests beside others, at any depth, with few slots and pages")
@pytest.mark.parametrize(
    "settings",
    [
        {"max_rows": 32},
        {"max_rows": 32, "run_ahead": 2},
        {"max_rows": 5, "run_ahead": 1},
        {"max_rows": 4, "max_queue": 8},
        {"max_rows": 4, "kv_memory": 9 * PAGE, "max_length": 48},
        {"max_rows": 8, "kv_memory": 9 * PAGE, "max_length": 48, "run_ahead": 1},
        {"max_rows": 16, "scheduler": "static"},
        {"max_rows": 16, "scheduler": {"use": "continuous", "options": {"chunk": 3}}},
    ],
    ids=str,
)
def test_requests_change_nothing_for_each_other(
    tiny_path: Path, alone: list[Any], make_engine: Callable[..., Any], settings: dict[str, Any]
) -> None:
    sampled = [SamplingParams(seed=index, max_tokens=12, ignore_eos=True) for index in range(3)]
    with Engine(tiny_path, device="cpu", max_rows=8) as other:
        plain = [other.generate([prompt(10 + i, 5)], params)[0].token_ids for i, params in enumerate(sampled)]
    engine = make_engine(tiny_path, device="cpu", **settings)
    handles = []
    for index in range(4):
        handles.append(engine.submit(prompt(index), BEAMS))
        if index < 3:
            handles.append(engine.submit(prompt(10 + index, 5), sampled[index]))
    outputs = [handle.result(timeout=120) for handle in handles]
    assert [told(output) for output in outputs[::2]] == alone
    assert [output.token_ids for output in outputs[1::2]] == plain
    empty(engine)


def test_beams_share_pages(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    """Six beams on a prompt of 12 pages fit where two copies of it don't."""
    engine = make_engine(tiny_path, device="cpu", kv_memory=22 * PAGE, max_length=256, max_rows=8)
    output = engine.generate([prompt(0, 192)], SamplingParams(num_beams=6, max_tokens=8, ignore_eos=True))[0]
    assert output.error is None
    assert output.metrics.preemptions == 0
    empty(engine)


def test_one_step_runs_all_beams(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    from pegboard import hookimpl

    class Rows:
        def __init__(self) -> None:
            self.seen: list[int] = []

        @hookimpl
        def pegboard_step_done(self, event: Any) -> None:
            self.seen.append(event.rows)

    rows = Rows()
    engine = make_engine(tiny_path, device="cpu", watchers=[rows])
    engine.generate([prompt(0)], SamplingParams(num_beams=5, max_tokens=9, ignore_eos=True))
    assert rows.seen == [1, *[5] * 8]


def test_logprobs_and_prompt_logprobs(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu")
    sampling = SamplingParams(num_beams=3, n=3, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    output = engine.generate([prompt(0)], sampling)[0]
    assert len(output.prompt_logprobs) == 19
    for completion in output.completions:
        records = completion.logprobs
        assert [record.token_id for record in records] == list(completion.token_ids)
        assert all(len(record.top) == 2 for record in records)
        assert completion.score == pytest.approx(sum(record.logprob for record in records) / 6, abs=1e-5)
    again = engine.generate([[*prompt(0), *output.token_ids]], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert [r.logprob for r in again.prompt_logprobs[-6:]] == pytest.approx(
        [r.logprob for r in output.completions[0].logprobs], abs=1e-4
    )


def test_abort_and_deadline_give_everything_back(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=8)
    long = SamplingParams(num_beams=4, n=3, max_tokens=400, ignore_eos=True)
    for delay in (0.0, 0.02, 0.1):
        handle = engine.submit(prompt(0), long)
        threading.Event().wait(delay)
        handle.abort()
        output = handle.result(timeout=60)
        assert [c.finish_reason for c in output.completions] == ["abort"] * 3
    late = engine.submit(prompt(0), long, timeout=0.1).result(timeout=60)
    assert [c.finish_reason for c in late.completions] == ["deadline"] * 3
    assert told(engine.generate([prompt(0)], BEAMS)[0])
    empty(engine)


@pytest.mark.parametrize(
    "settings", [{"max_rows": 8}, {"max_rows": 5, "kv_memory": 10 * PAGE, "max_length": 48}], ids=str
)
def test_many_cancels_leak_nothing(tiny_path: Path, make_engine: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Whenever they come, and whatever runs beside: the rest ends as it should."""
    random = Random(1)
    engine = make_engine(tiny_path, device="cpu", run_ahead=1, **settings)
    right: dict[int, Any] = {}
    for _ in range(4):
        kept = []
        for index in range(8):
            if random.random() < 0.3:
                engine.submit(prompt(index), SamplingParams(seed=1, max_tokens=random.randint(1, 20)))
            handle = engine.submit(prompt(index), BEAMS, timeout=random.choice([None, None, 0.05]))
            if random.random() < 0.5:
                threading.Event().wait(random.choice([0.0, 0.005, 0.02]))
                handle.abort()
            kept.append((index, handle))
        for index, handle in kept:
            output = handle.result(timeout=120)
            reasons = {completion.finish_reason for completion in output.completions}
            assert len(reasons) == 1
            if reasons == {"length"}:
                assert right.setdefault(index, told(output)) == told(output)
            else:
                assert reasons <= {"abort", "deadline"}
    while engine._phases.scheduler.has_work():
        threading.Event().wait(0.01)
    empty(engine)


@pytest.mark.parametrize("place", ["sampler.sample", "executor.launch", "scheduler.commit", "scheduler.fork"])
def test_a_failure_ends_the_search_and_not_the_engine(tiny_path: Path, alone: list[Any], place: str) -> None:
    faults = Faults()
    faults.fail(place, call=3)
    with isolated_engine(tiny_path, plugins=[faults], max_rows=8, **faults.settings) as engine:
        output = engine.generate([prompt(0)], BEAMS)[0]
        assert output.error
        assert "injected fault" in output.error
        assert [c.finish_reason for c in output.completions] == ["error"] * 2
        assert told(engine.generate([prompt(0)], BEAMS)[0]) == alone[0]
        empty(engine)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_beams": 0}, "num_beams is 0, must be a whole number from 1"),
        ({"num_beams": 4, "early_stopping": "always"}, "must be True, False or 'never'"),
        ({"num_beams": 4, "length_penalty": float("nan")}, "length_penalty is nan"),
        ({"num_beams": 4, "n": 5}, "n is 5; beam search gives at most num_beams, 4"),
        ({"num_beams": 4, "temperature": 0.7}, "temperature is 0.7; beam search"),
        ({"num_beams": 4, "stop": ("x",)}, "stop is"),
        ({"num_beams": 9}, "num_beams is 9; at most 8 sequences run at once"),
        ({"num_beams": 8, "stop_token_ids": tuple(range(100, 140))}, "a step looks at 336 tokens, the model has 211"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0, which is for beam search: set num_beams"),
    ],
)
def test_what_can_not_be_is_refused(tiny_path: Path, make_engine: Any, fields: dict[str, Any], reason: str) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=8)
    with pytest.raises(InvalidRequest, match=reason.replace("(", r"\(")):
        engine.submit(prompt(0), SamplingParams(**fields))


def test_a_scheduler_that_chooses_itself_serves_none(tiny_path: Path) -> None:
    from pegboard_scheduling.continuous import ContinuousScheduler
    from pegboard_scheduling.options import ContinuousOptions

    class Own(ContinuousScheduler):
        host_chooses = False

    faults = Faults()
    faults.wrap("scheduler", Own, ContinuousOptions)
    faults.fail("scheduler.fork")
    with (
        isolated_engine(tiny_path, plugins=[faults], **faults.settings) as engine,
        pytest.raises(InvalidRequest, match="this scheduler serves no beam search"),
    ):
        engine.submit(prompt(0), BEAMS)
