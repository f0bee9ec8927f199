"""Observers of a running engine: which hooks come, in which order, with what; and that they can't hurt it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard import ConfigError, Engine, Part, PegboardError, SamplingParams, hookimpl
from pegboard.contracts.observer import EngineReady, RequestAdmitted, RequestFinished, StepDone
from pegboard.ops import TorchOps
from pegboard.runner import LocalExecutor
from pegboard_attention.torch_backend import TorchAttention
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions

PROMPT = [1, 17, 42, 200, 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class Base:
    @classmethod
    def refusals(cls, need: None, options: Any) -> Sequence[str]:
        return []

    @classmethod
    def create(cls, need: None, options: Any) -> Any:
        return cls()


def observing(*kinds: type) -> dict[str, Any]:
    """Settings of an engine that is watched by these, told in this order."""

    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            return [Part(role="observer", name=k.__name__.lower(), factory=k, summary="for a test") for k in kinds]

    return {"plugins": [Plugin()], "observers": [kind.__name__.lower() for kind in kinds]}


def recorder() -> Any:
    """A class of observers whose `seen` holds (hook, event) of all of them."""

    class Recorder(Base):
        seen: list[tuple[str, Any]] = []

        @hookimpl
        def pegboard_engine_ready(self, event: EngineReady) -> None:
            self.seen.append(("ready", event))

        @hookimpl
        def pegboard_request_admitted(self, event: RequestAdmitted) -> None:
            self.seen.append(("admitted", event))

        @hookimpl
        def pegboard_request_finished(self, event: RequestFinished) -> None:
            self.seen.append(("finished", event))

        @hookimpl
        def pegboard_step_done(self, event: StepDone) -> None:
            self.seen.append(("step", event))

        @hookimpl
        def pegboard_engine_closed(self) -> None:
            self.seen.append(("closed", None))

    return Recorder


def events(kind: Any, name: str) -> list[Any]:
    return [event for hook, event in kind.seen if hook == name]


def arrives(condition: Callable[[], bool]) -> bool:
    """Whether it holds within 10 s: a hook may come just after the result is there."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.002)
    return False


@pytest.fixture
def start(tiny_path: Path, make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    def make(*kinds: type, **settings: Any) -> Engine:
        common = {"device": "cpu", "max_rows": 2, "max_length": 256}
        return make_engine(tiny_path, **(common | observing(*kinds) | settings))

    return make


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_life_of_an_engine(start: Callable[..., Engine], ahead: int) -> None:
    seen = recorder()
    engine = start(seen, run_ahead=ahead)
    assert [hook for hook, _ in seen.seen] == ["ready"]
    ready = events(seen, "ready")[0]
    assert 0 < ready.load_seconds < 60
    assert {"attention", "cache", "scheduler", "sampler", "model"} <= set(ready.parts)
    assert (ready.parts["model"], ready.parts["scheduler"]) == ("llama", "continuous")

    output = engine.submit(PROMPT, GREEDY, id="mine").result(timeout=10)
    assert arrives(lambda: len(events(seen, "finished")) == 1)
    assert events(seen, "admitted") == [RequestAdmitted(id="mine", prompt_tokens=5)]
    finished = events(seen, "finished")[0]
    assert (finished.id, finished.finish_reason, finished.error) == ("mine", "length", None)
    assert finished.metrics == output.metrics
    assert finished.metrics.output_tokens == 4

    assert arrives(lambda: len(events(seen, "step")) >= 4)
    engine.close()
    steps = events(seen, "step")
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    # Four tokens take four steps; what flew beyond them is retired, too.
    assert 4 <= len(steps) <= 4 + ahead
    assert all(step.rows == 1 and 0 < step.seconds < 10 for step in steps)
    assert [(step.waiting, step.running) for step in steps[:3]] == [(0, 1)] * 3
    assert (steps[-1].waiting, steps[-1].running) == (0, 0)
    assert seen.seen[-1] == ("closed", None)
    assert len(events(seen, "closed")) == 1


def slow(base: type, method: str, seconds: float) -> type:
    """`base` whose `method` sleeps first."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return getattr(base, method)(self, *args, **kwargs)

    return type("Slow", (base,), {method: wrapped})


@pytest.mark.parametrize(
    ("role", "part", "options", "phase"),
    [
        ("scheduler", slow(ContinuousScheduler, "schedule", 0.05), ContinuousOptions, "schedule"),
        ("scheduler", slow(ContinuousScheduler, "commit", 0.05), ContinuousOptions, "commit"),
        ("ops", slow(TorchOps, "embed", 0.05), None, "launch"),
        ("attention", slow(TorchAttention, "plan", 0.05), None, "executor"),
        ("executor", slow(LocalExecutor, "retire", 0.05), None, "retire"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_times_lie_where_they_were_spent(
    start: Callable[..., Engine], role: str, part: type, options: Any, phase: str
) -> None:
    """A part that sleeps 50 ms shows in its own phase, the model's sleep not in the host's."""

    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            return [Part(role=role, name="slow", factory=part, options=options, summary="for a test")]

    seen = recorder()
    engine = start(plugins=[Plugin()], observers=[], watchers=[seen()], run_ahead=0, **{role: "slow"})
    engine.submit(PROMPT, GREEDY).result(timeout=10)
    assert arrives(lambda: len(events(seen, "step")) >= 4)
    fastest = min(events(seen, "step"), key=lambda step: step.seconds)
    times = {field: getattr(fastest.times, field) for field in ("schedule", "launch", "retire", "commit", "emit")}
    assert sum(times.values()) == pytest.approx(fastest.seconds)
    assert 0 < fastest.times.executor <= times["launch"] + times["retire"]
    assert getattr(fastest.times, phase) > 0.05
    others = sum(seconds for field, seconds in times.items() if field != ("launch" if phase == "executor" else phase))
    assert others < 0.05
    host = fastest.times.host
    assert host == pytest.approx(times["schedule"] + fastest.times.executor + times["commit"] + times["emit"])
    assert (host > 0.05) == (phase in ("schedule", "commit", "executor"))


def test_steps_tell_who_waits_and_who_runs(start: Callable[..., Engine]) -> None:
    seen = recorder()
    engine = start(seen)
    handles = [engine.submit(PROMPT, LONG) for _ in range(5)]
    assert all(handle.result(timeout=20).error is None for handle in handles)
    counts = {(step.waiting, step.running) for step in events(seen, "step")}
    assert (3, 2) in counts
    assert max(step.rows for step in events(seen, "step")) == 2


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("end", ["length", "abort", "deadline"])
def test_finished_comes_once_for_each_continuation(start: Callable[..., Engine], end: str, n: int) -> None:
    """By the id that was admitted."""
    seen = recorder()
    engine = start(seen)
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=4 if end == "length" else 200, ignore_eos=True, n=n)
    handle = engine.submit(PROMPT, sampling, id="mine", timeout=0.05 if end == "deadline" else None)
    if end == "abort":
        handle.take(timeout=10)
        handle.abort()
    output = handle.result(timeout=10)
    engine.submit(PROMPT, GREEDY).result(timeout=10)
    assert arrives(lambda: len(events(seen, "finished")) > n)
    assert events(seen, "admitted")[0].id == "mine"
    finished = sorted((e for e in events(seen, "finished") if e.id == "mine"), key=lambda e: e.index)
    assert [(event.index, event.finish_reason) for event in finished] == [(i, end) for i in range(n)]
    assert [event.metrics for event in finished] == [c.metrics for c in output.completions]


def test_finished_comes_for_requests_that_closing_ends(start: Callable[..., Engine]) -> None:
    """ "A request ended, for whatever reason." Closing is one, and is told last."""
    seen = recorder()
    engine = start(seen)
    handles = [engine.submit(PROMPT, LONG) for _ in range(4)]
    handles[0].take(timeout=10)
    engine.close()
    assert sorted(event.id for event in events(seen, "finished")) == sorted(handle.id for handle in handles)
    assert all(event.finish_reason == "error" and "closed" in event.error for event in events(seen, "finished"))
    assert seen.seen[-1] == ("closed", None)


def test_requests_that_were_refused_are_no_events(start: Callable[..., Engine]) -> None:
    from pegboard import InvalidRequest

    seen = recorder()
    engine = start(seen)
    with pytest.raises(InvalidRequest):
        engine.submit([], GREEDY)
    engine.submit(PROMPT, GREEDY, id="good").result(timeout=10)
    assert [event.id for event in events(seen, "admitted")] == ["good"]


def test_admitted_comes_before_finished(start: Callable[..., Engine]) -> None:
    """Even for an observer behind one that takes its time over the admission."""
    seen = recorder()

    class Slow(Base):
        @hookimpl
        def pegboard_request_admitted(self) -> None:
            time.sleep(0.2)

    engine = start(Slow, seen)
    engine.submit(PROMPT, GREEDY).result(timeout=10)
    assert arrives(lambda: bool(events(seen, "finished")))
    assert [hook for hook, _ in seen.seen if hook in ("admitted", "finished")] == ["admitted", "finished"]


def test_requests_are_told_on_the_steps_thread(start: Callable[..., Engine]) -> None:
    """The contract says that hooks run there, so an observer needs no locks: while one runs, none other does."""
    threads: list[tuple[str, str]] = []

    class Where(Base):
        @hookimpl
        def pegboard_request_admitted(self) -> None:
            threads.append(("admitted", threading.current_thread().name))

        @hookimpl
        def pegboard_request_finished(self) -> None:
            threads.append(("finished", threading.current_thread().name))

        @hookimpl
        def pegboard_step_done(self) -> None:
            threads.append(("step", threading.current_thread().name))

    engine = start(Where)
    engine.submit(PROMPT, GREEDY).result(timeout=10)
    assert arrives(lambda: {hook for hook, _ in threads} == {"admitted", "finished", "step"})
    assert {name for _, name in threads} == {"pegboard-step"}


@pytest.mark.parametrize("hook", ["engine_ready", "request_admitted", "request_finished", "step_done", "engine_closed"])
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_an_observer_that_raises_is_dropped(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture, hook: str, error: type[BaseException]
) -> None:
    """Logged once and told nothing more; the one behind it hears everything, and requests are served."""
    calls: list[str] = []

    def raises(self: Any) -> None:
        calls.append(hook)
        raise error("disk is full")

    def hears(self: Any) -> None:
        calls.append("closed")

    raises.__name__, hears.__name__ = f"pegboard_{hook}", "pegboard_engine_closed"
    methods = {f"pegboard_{hook}": hookimpl(raises)}
    if hook != "engine_closed":
        methods["pegboard_engine_closed"] = hookimpl(hears)
    seen = recorder()
    with caplog.at_level(logging.ERROR, "pegboard"):
        engine = start(type("Raises", (Base,), methods), seen)
        right = engine.submit(PROMPT, GREEDY).result(timeout=10).raise_for_error().token_ids
        assert engine.submit(PROMPT, GREEDY).result(timeout=10).raise_for_error().token_ids == right
        engine.close()
    assert calls == [hook]
    assert len([record for record in caplog.records if "dropped" in record.getMessage()]) == 1
    assert {name for name, _ in seen.seen} == {"ready", "admitted", "finished", "step", "closed"}
    assert len(events(seen, "finished")) == 2


def test_an_observer_that_asks_the_engine(start: Callable[..., Engine]) -> None:
    """From inside a hook, on whatever thread: stats, another request, an abort. No deadlock."""
    asked: list[Any] = []

    class Asks(Base):
        @hookimpl
        def pegboard_request_finished(self, event: RequestFinished) -> None:
            if event.id == "first":
                asked.append(engine.stats())
                asked.append(engine.submit(PROMPT, GREEDY, id="second"))
                asked.append(engine.abort("nobody"))

    engine = start(Asks)
    engine.submit(PROMPT, GREEDY, id="first").result(timeout=10)
    assert arrives(lambda: len(asked) == 3)
    assert asked[1].result(timeout=10).error is None
    assert asked[2] is False


def test_an_observer_that_waits_is_told(start: Callable[..., Engine]) -> None:
    """The engine's own thread would wait for itself."""
    asked: list[Any] = []

    class Waits(Base):
        @hookimpl
        def pegboard_request_finished(self, event: RequestFinished) -> None:
            if event.id == "first":
                handle = engine.submit(PROMPT, GREEDY, id="second")
                for wait in (handle.result, handle.take):
                    with pytest.raises(PegboardError, match="own thread would wait for itself"):
                        wait()
                asked.append(handle)

    engine = start(Waits)
    engine.submit(PROMPT, GREEDY, id="first").result(timeout=10)
    assert arrives(lambda: bool(asked))
    assert asked[0].result(timeout=10).error is None


def test_an_observer_that_closes_the_engine(start: Callable[..., Engine]) -> None:
    class Closes(Base):
        @hookimpl
        def pegboard_request_finished(self) -> None:
            engine.close()
            closed.append(True)

    closed: list[bool] = []
    engine = start(Closes)
    beside = engine.submit(PROMPT, LONG)
    engine.submit(PROMPT, GREEDY).result(timeout=10)
    assert beside.result(timeout=10).finish_reason == "error"
    assert arrives(lambda: bool(closed))
    engine.close()


def test_an_observer_that_closes_what_is_being_closed(start: Callable[..., Engine]) -> None:
    """Closing ends requests, of which the observer is told: then it closes in its turn."""

    class Closes(Base):
        @hookimpl
        def pegboard_request_finished(self) -> None:
            engine.close()

        @hookimpl
        def pegboard_engine_closed(self) -> None:
            engine.close()

    engine = start(Closes)
    handle = engine.submit(PROMPT, LONG)
    handle.take(timeout=10)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert handle.result(timeout=1).finish_reason == "error"


def test_an_observer_with_a_misspelt_hook_is_refused(start: Callable[..., Engine]) -> None:
    class Misspelt(Base):
        @hookimpl
        def pegboard_step_dome(self) -> None: ...

    with pytest.raises(ConfigError, match=r"observers\[0\] = .*pegboard_step_dome.*pegboard_step_done"):
        start(Misspelt)
