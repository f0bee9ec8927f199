"""What one request wants, or suffers, is nobody else's business."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard import InvalidRequest, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def until(done: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.005)
    return done()


def test_logprobs_are_each_requests_own(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=4, max_length=128)
    wishes = (None, 0, 1, 3)
    handles = [
        engine.submit([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=wish))
        for wish in wishes
    ]
    for wish, handle in zip(wishes, handles, strict=True):
        found = handle.result(timeout=30).raise_for_error().completions[0].logprobs
        if wish is None:
            assert found is None
        else:
            assert [len(record.top) for record in found] == [wish] * 20
            assert all(record.logprob <= 0 for record in found)


def test_readers_who_are_slow_do_not_keep_others_waiting(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    """As many of them as there are rows."""
    engine = make_engine(tiny_path, device="cpu", max_rows=2, max_length=128, stream_buffer=4)
    slow = [engine.submit([9, 8, n], LONG) for n in (3, 4)]
    assert until(lambda: engine.stats().paused == 2)
    assert engine.submit([5, 6, 7], SHORT).result(timeout=20).raise_for_error().finish_reason == "length"
    for handle in slow:
        assert len([token for delta in handle for token in delta.token_ids]) == 60
    again = [engine.submit([9, 8, n], LONG).result(timeout=30).token_ids for n in (3, 4)]
    assert [handle.result().token_ids for handle in slow] == again


def test_a_deadline_in_the_far_future(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_length=128, stream_buffer=4)
    slow = engine.submit([9, 8, 7], LONG, timeout=1e12)
    assert until(lambda: engine.stats().paused == 1)
    time.sleep(0.05)
    assert engine.submit([5, 6, 7], SHORT).result(timeout=20).error is None
    assert slow.result(timeout=20).error is None


def test_a_listener_that_raises(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=2, max_length=128)
    bad, good = engine.submit([1, 2, 3], LONG), engine.submit([4, 5, 6], LONG)
    calls: list[int] = []

    def listener() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("not my day")

    bad.listen(listener)
    assert good.result(timeout=20).error is None
    assert bad.result(timeout=20).error is None
    assert len(calls) == 2


def test_a_request_that_leaves_itself_nothing_to_choose(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    """It fails, and nobody's prefixes are forgotten for it."""
    engine = make_engine(tiny_path, device="cpu", max_rows=2, max_length=128)
    prompt = [7] * 40
    engine.submit(prompt, SHORT).result(timeout=20)
    nothing = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2, stop_token_ids=tuple(range(211)))
    assert "no token was left" in str(engine.submit([3, 4], nothing).result(timeout=20).error)
    assert engine.submit(prompt, SHORT).result(timeout=20).metrics.cached_tokens == 32


def test_closing_from_two_threads_waits_for_the_step(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=8, max_length=512)
    handles = [engine.submit([n + 1] * 200, LONG) for n in range(8)]
    left: list[bool] = []

    def close() -> None:
        engine.close()
        left.append(
            any(thread.name == "pegboard-step" and thread is engine._thread for thread in threading.enumerate())
        )

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert left == [False] * 4
    assert all(handle.result(timeout=5).finish_reason == "error" for handle in handles)
    assert engine.stats().running == 0


def test_parameters_given_for_many_prompts_are_the_callers_own_mistake(
    tiny_path: Path, make_engine: Callable[..., Any]
) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=2, max_length=128)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=0))
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        engine.generate([[1, 2]], max_tokens=3)
    with pytest.raises(InvalidRequest, match="chat"):
        engine.generate([{"role": "user", "content": "hi"}])
