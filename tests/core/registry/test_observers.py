from __future__ import annotations

import logging
from typing import Any

import pytest

from pegboard.contracts.observer import (
    EngineReady,
    Observer,
    RequestAdmitted,
    RequestFinished,
    RequestMetrics,
    StepDone,
    StepTimes,
)
from pegboard.errors import PluginError
from pegboard.registry.hookspecs import ObserverSpec, PluginSpec, hookimpl
from pegboard.registry.observers import HOOKS, Observers, hook_problems

EVENTS: dict[str, Any] = {
    "pegboard_engine_ready": EngineReady(parts={"ops": "torch"}, load_seconds=1.0),
    "pegboard_request_admitted": RequestAdmitted(id="r", prompt_tokens=3),
    "pegboard_request_finished": RequestFinished(id="r", index=0, finish_reason="stop", metrics=RequestMetrics()),
    "pegboard_step_done": StepDone(
        step=1,
        rows=1,
        seconds=0.1,
        waiting=0,
        running=1,
        times=StepTimes(schedule=0.01, launch=0.05, retire=0.01, commit=0.01, emit=0.02),
    ),
    "pegboard_engine_closed": None,
}


class Everything:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    @hookimpl
    def pegboard_engine_ready(self, event: EngineReady) -> None:
        self.seen.append(("pegboard_engine_ready", event))

    @hookimpl
    def pegboard_request_admitted(self, event: RequestAdmitted) -> None:
        self.seen.append(("pegboard_request_admitted", event))

    @hookimpl
    def pegboard_request_finished(self, event: RequestFinished) -> None:
        self.seen.append(("pegboard_request_finished", event))

    @hookimpl
    def pegboard_step_done(self) -> None:  # a subset of the arguments
        self.seen.append(("pegboard_step_done", None))

    @hookimpl
    def pegboard_engine_closed(self) -> None:
        self.seen.append(("pegboard_engine_closed", None))


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    @hookimpl
    def pegboard_step_done(self, event: StepDone) -> None:
        self.calls += 1
        raise self.error


def test_every_hook_is_documented_and_has_an_event() -> None:
    assert set(HOOKS) == set(EVENTS)
    for spec in (PluginSpec, ObserverSpec):
        for name in (name for name in vars(spec) if name.startswith("pegboard_")):
            assert len(getattr(spec, name).__doc__) > 40, name


def test_every_hook_reaches_the_observer() -> None:
    observer = Everything()
    observers = Observers([observer])
    for hook, event in EVENTS.items():
        observers.notify(hook, event)
    assert observer.seen == [(hook, None if hook == "pegboard_step_done" else event) for hook, event in EVENTS.items()]


@pytest.mark.parametrize("error", [RuntimeError("full disk"), SystemExit(1)])
def test_one_that_raises_is_logged_and_dropped_and_the_others_are_told(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    first, bad, last = Everything(), Raises(error), Everything()
    observers = Observers([first, bad, last])
    with caplog.at_level(logging.ERROR, "pegboard"):
        for _ in range(2):
            observers.notify("pegboard_step_done", EVENTS["pegboard_step_done"])
    assert bad.calls == 1
    assert len(first.seen) == len(last.seen) == 2
    assert observers.active == (first, last)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    assert "pegboard_step_done" in record.getMessage()


def test_the_same_class_twice_is_two_observers() -> None:
    one, two = Everything(), Everything()
    Observers([one, two]).notify("pegboard_engine_closed")
    assert one.seen == two.seen == [("pegboard_engine_closed", None)]


def test_a_misspelt_hook_is_refused_with_the_nearest() -> None:
    class Misspelt:
        @hookimpl
        def pegboard_step_finished(self, event: StepDone) -> None: ...

    with pytest.raises(PluginError, match="unknown hook 'pegboard_step_finished'; did you mean 'pegboard_"):
        Observers([Misspelt()])


def test_a_wrong_argument_is_refused() -> None:
    class Wrong:
        @hookimpl
        def pegboard_step_done(self, step: StepDone) -> None: ...

    with pytest.raises(PluginError, match=r"Argument\(s\) {'step'}"):
        Observers([Wrong()])


def test_an_observer_that_would_hear_nothing_is_refused() -> None:
    class Unmarked:
        def pegboard_step_done(self, event: StepDone) -> None: ...

    with pytest.raises(PluginError, match="mark its methods @hookimpl"):
        Observers([Unmarked()])


def test_an_async_hook_is_refused() -> None:
    class Async:
        @hookimpl
        async def pegboard_step_done(self, event: StepDone) -> None: ...

    with pytest.raises(PluginError, match="is async"):
        Observers([Async()])


def test_an_unknown_hook_cannot_be_notified() -> None:
    with pytest.raises(ValueError, match="did you mean 'pegboard_step_done'"):
        Observers().notify("pegboard_step_don")


class Part(Observer):
    @classmethod
    def refusals(cls, need: None, options: Any) -> list[str]:
        return []

    @classmethod
    def create(cls, need: None, options: Any) -> Any:
        raise AssertionError("nothing is made for a check")


class MisspeltPart(Part):
    @hookimpl
    def pegboard_step_don(self, event: StepDone) -> None: ...


class WrongPart(Part):
    @hookimpl
    def pegboard_step_done(self, step: StepDone) -> None: ...


class AsyncPart(Part):
    @hookimpl
    async def pegboard_engine_closed(self) -> None: ...


class SoundPart(Part):
    @hookimpl
    def pegboard_step_done(self, event: StepDone) -> None: ...

    @hookimpl
    def pegboard_engine_closed(self) -> None: ...


class MakesAnother:
    """Its `create` returns something of another class, which alone could tell."""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (MisspeltPart, "unknown hook 'pegboard_step_don'; did you mean 'pegboard_step_done'?"),
        (WrongPart, "Argument(s) {'step'}"),
        (AsyncPart, "is async"),
        (Part, "implements no hook"),
    ],
)
def test_what_an_engine_would_refuse_is_seen_from_the_class(factory: type, said: str) -> None:
    (problem,) = hook_problems(factory)
    assert said in problem


@pytest.mark.parametrize("factory", [SoundPart, MakesAnother, MakesAnother()])
def test_sound_observers_and_what_cannot_be_seen_have_no_problems(factory: object) -> None:
    assert hook_problems(factory) == []
