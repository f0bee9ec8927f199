"""From `Engine(...)` to `close()` and beyond: threads, memory, forks, the end of the process, what is left alone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine, EngineDead, Part, SamplingParams, hookimpl
from pegboard_sampling.torch_sampler import TorchSampler

PROMPT = [1, 17, 42, 200, 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def good(tiny_path: Path) -> tuple[int, ...]:
    """Greedy ids, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


class Slow:
    """A plugin object whose sampler takes 5 ms a step."""

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        class Sampler(TorchSampler):
            def sample(self, logits: torch.Tensor, rows: Any) -> Any:
                time.sleep(0.005)
                return super().sample(logits, rows)

        return [Part(role="sampler", name="slow", factory=Sampler, summary="for a test")]


def make(path: Path, **settings: Any) -> Engine:
    common: dict[str, Any] = {"device": "cpu", "max_rows": 2, "max_length": 256}
    return Engine(path, **(common | settings))


def slow(path: Path, **settings: Any) -> Engine:
    return make(path, plugins=[Slow()], sampler="slow", **settings)


def steps() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pegboard-step"]


def tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def settles(condition: Callable[[], bool]) -> bool:
    """Whether it holds within 10 s."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.002)
    return False


# -- closing


def test_context_manager(tiny_path: Path, good: tuple[int, ...]) -> None:
    with make(tiny_path) as engine:
        assert engine.submit(PROMPT, GREEDY).result(timeout=10).token_ids == good
        assert len(steps()) == 1
    assert steps() == []
    with pytest.raises(EngineDead, match="closed"):
        engine.submit(PROMPT, GREEDY)


def test_context_manager_lets_exceptions_through(tiny_path: Path) -> None:
    def fail() -> None:
        with make(tiny_path) as engine:
            engine.submit(PROMPT, LONG)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert steps() == []


def test_close_twice_and_from_many_threads(tiny_path: Path) -> None:
    engine = slow(tiny_path)
    handle = engine.submit(PROMPT, LONG)
    threads = [threading.Thread(target=engine.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    engine.close()
    assert handle.result(timeout=1).finish_reason == "error"


def test_everything_after_close(tiny_path: Path) -> None:
    engine = make(tiny_path)
    engine.close()
    calls: Sequence[Callable[[], Any]] = (
        lambda: engine.submit(PROMPT, GREEDY),
        lambda: engine.generate([PROMPT], GREEDY),
        lambda: list(engine.stream(PROMPT, GREEDY)),
    )
    for call in calls:
        with pytest.raises(EngineDead, match="closed"):
            call()
    assert engine.abort("nobody") is False
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize("ahead", [0, 2])
def test_close_ends_every_stream(tiny_path: Path, ahead: int) -> None:
    """Running, queued, paused, with several samples, listened to and not: one terminal delta each."""
    engine = slow(tiny_path, run_ahead=ahead, max_rows=4, stream_buffer=3)
    paused = engine.submit(PROMPT, LONG)
    assert settles(lambda: engine.stats().paused == 1)
    several = engine.submit(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True, n=3))
    queued = [engine.submit(PROMPT, LONG) for _ in range(4)]
    waiting: list[Any] = []
    listener = threading.Thread(target=lambda: waiting.append(queued[0].result()))
    listener.start()
    assert several.take(timeout=10) is not None
    engine.close()
    listener.join(10)
    assert waiting[0].finish_reason == "error"
    for handle in (paused, several, *queued[1:]):
        deltas = []
        while (delta := handle.take(timeout=1)) is not None:
            deltas.append(delta)
        for index in handle.indices.values():
            own = [delta for delta in deltas if delta.index == index]
            assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["error"]
            assert "closed" in str(own[-1].error)
    assert settles(lambda: steps() == [])


def test_a_generate_that_is_under_way_ends(tiny_path: Path) -> None:
    """In another thread, with more prompts than the queue holds: it returns or raises EngineDead, and never hangs."""
    engine = slow(tiny_path, max_queue=2)
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(engine.generate([PROMPT] * 20, LONG))
        except EngineDead as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert settles(lambda: engine.stats().running == 2)
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(found[0], EngineDead) or all(output.error for output in found[0])


# -- memory and threads


def test_a_forgotten_engine_stops_its_thread(tiny_path: Path) -> None:
    engine = make(tiny_path)
    engine.submit(PROMPT, GREEDY).result(timeout=10)
    gone = weakref.ref(engine)
    del engine
    assert settles(lambda: (gc.collect(), gone() is None)[1])
    assert settles(lambda: steps() == [])


def test_an_engine_that_is_forgotten_with_a_paused_request(tiny_path: Path) -> None:
    def use() -> weakref.ref[Engine]:
        engine = slow(tiny_path, stream_buffer=2)
        engine.submit(PROMPT, LONG)
        assert settles(lambda: engine.stats().paused == 1)
        return weakref.ref(engine)

    gone = use()
    assert settles(lambda: (gc.collect(), gone() is None)[1])
    assert settles(lambda: steps() == [])


def test_a_request_keeps_its_engine(tiny_path: Path, good: tuple[int, ...]) -> None:
    """Engine(...).submit(...).result(): nobody but the handle holds the engine."""
    handle = make(tiny_path).submit(PROMPT, GREEDY)
    gc.collect()
    assert handle.result(timeout=10).raise_for_error().token_ids == good
    del handle
    gc.collect()
    assert settles(lambda: steps() == [])


@pytest.mark.supports("Engine", "close() gives memory back")
def test_close_gives_memory_back(tiny_path: Path) -> None:
    """Even while the closed engine itself is still held."""
    gc.collect()
    before = tensors()
    engine = make(tiny_path)
    engine.submit(PROMPT, GREEDY).result(timeout=10)
    assert tensors() > before
    engine.close()
    gc.collect()
    assert tensors() <= before
    assert not any(str(tiny_path) in line for line in _maps()), "the weights' file is still mapped"


def _maps() -> list[str]:
    maps = Path("/proc/self/maps")
    return maps.read_text().splitlines() if maps.exists() else []


def test_ten_engines_leave_nothing(tiny_path: Path) -> None:
    with make(tiny_path) as engine:  # whatever is made once for the process
        engine.submit(PROMPT, GREEDY).result(timeout=10)
    del engine
    gc.collect()
    before = (threading.active_count(), tensors(), _descriptors())
    for index in range(10):
        with make(tiny_path, run_ahead=index % 3) as engine:
            engine.submit(PROMPT, GREEDY).result(timeout=10)
            if index % 2:
                engine.submit(PROMPT, LONG)
    del engine
    gc.collect()
    assert (threading.active_count(), tensors(), _descriptors()) == before
    assert not any(type(thing) is Engine for thing in gc.get_objects())


def _descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_nothing_of_a_request_stays(tiny_path: Path) -> None:
    """However it ended, an engine holds no handle of it."""
    with slow(tiny_path) as engine:
        handles = [
            engine.submit(PROMPT, GREEDY),
            engine.submit(PROMPT, LONG, timeout=0.02),
            engine.submit(PROMPT, SamplingParams(max_tokens=4, n=2)),
            engine.submit(PROMPT, LONG),
        ]
        handles[3].abort()
        for handle in handles:
            handle.result(timeout=10)
        engine.submit(PROMPT, GREEDY).result(timeout=10)
        gone = [weakref.ref(handle) for handle in handles]
        del handle, handles
        gc.collect()
        assert [ref() for ref in gone] == [None] * 4


# -- several engines


@pytest.mark.supports("Engine", "several engines in one process")
def test_two_engines_with_different_parts_at_once(tiny_path: Path, good: tuple[int, ...]) -> None:
    """In one process, driven from four threads: neither feels the other."""
    first = make(tiny_path, scheduler="static", run_ahead=1, page_size=16)
    second = make(tiny_path, dtype="float64", cache={"use": "paged", "options": {"prefix_reuse": False}}, page_size=64)
    found: list[tuple[int, ...]] = []

    def drive(engine: Engine) -> None:
        for _ in range(4):
            found.extend(output.token_ids for output in engine.generate([PROMPT] * 3, GREEDY))

    threads = [threading.Thread(target=drive, args=(engine,), daemon=True) for engine in (first, second) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [good] * 48
    first.close()
    assert second.submit(PROMPT, GREEDY).result(timeout=10).token_ids == good
    second.close()


def test_threads_are_what_the_config_says(tiny_path: Path) -> None:
    """`threads` holds for the engine's own work, and nobody else's torch feels it."""
    seen: list[int] = []

    class Counting:
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            class Sampler(TorchSampler):
                def sample(self, logits: torch.Tensor, rows: Any) -> Any:
                    seen.append(torch.get_num_threads())
                    return super().sample(logits, rows)

            return [Part(role="sampler", name="counting", factory=Sampler, summary="for a test")]

    before = torch.get_num_threads()
    for wanted in (2, 1):
        with make(tiny_path, plugins=[Counting()], sampler="counting", threads=wanted) as engine:
            engine.submit(PROMPT, GREEDY).result(timeout=10)
        assert set(seen) == {wanted}
        seen.clear()
        assert torch.get_num_threads() == before


# -- processes


def script(path: Path, body: str, seconds: float = 40) -> subprocess.CompletedProcess[str]:
    """Run `body` in a fresh process, with an engine's arguments at hand."""
    head = f"""
    import gc, logging, os, signal, sys, threading, time
    import torch
    from pegboard import Engine, EngineDead, PegboardError, SamplingParams
    torch.set_num_threads(1)
    PATH, PROMPT = {str(path)!r}, {PROMPT!r}
    GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    SETTINGS = dict(device="cpu", max_rows=2, max_length=256)
    """
    source = textwrap.dedent(head) + textwrap.dedent(body)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(
    "before",
    [
        "engine.submit(PROMPT, GREEDY).result(timeout=20)",
        "handle = engine.submit(PROMPT, LONG)",
        "stream = engine.stream(PROMPT, LONG); next(iter(stream))",
        "engine.submit(PROMPT, LONG); del engine",
    ],
    ids=["idle", "running", "in a stream", "forgotten"],
)
def test_the_process_ends_without_close(tiny_path: Path, before: str) -> None:
    done = script(tiny_path, f"engine = Engine(PATH, **SETTINGS)\n{before}\nprint('end')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_the_process_ends_by_an_exception(tiny_path: Path) -> None:
    done = script(tiny_path, "engine = Engine(PATH, **SETTINGS)\nengine.submit(PROMPT, LONG)\nraise SystemExit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


FORK = """
import warnings
warnings.simplefilter("ignore")  # Python's own word about threads and fork
engine = Engine(PATH, **SETTINGS)
right = engine.submit(PROMPT, GREEDY).result(timeout=20).token_ids
%(before)s
child = os.fork()
if child == 0:
    signal.alarm(15)  # a deadlock ends it
    said = []
    for call in (
        lambda: engine.submit(PROMPT, GREEDY),
        lambda: engine.generate([PROMPT], GREEDY),
        lambda: engine.stream(PROMPT, GREEDY),
    ):
        try:
            call()
            said.append("nothing")
        except EngineDead as error:
            said.append("fork" in str(error) and "spawn" in str(error))
    engine.close()
    print("child", said, flush=True)
    %(end)s
_, status = os.waitpid(child, 0)
print("status", status)
print("parent", engine.submit(PROMPT, GREEDY).result(timeout=20).token_ids == right)
engine.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("before", "end"),
    [("", "sys.exit(0)"), ("engine.submit(PROMPT, LONG); time.sleep(0.02)", "os._exit(0)")],
    ids=["idle", "running"],
)
def test_a_forked_child_is_told(tiny_path: Path, before: str, end: str) -> None:
    """There is no step's thread in the child: it is told so at once, and the parent's engine goes on."""
    done = script(tiny_path, FORK % {"before": before, "end": end})
    assert done.stdout.splitlines() == ["child [True, True, True]", "status 0", "parent True"], done.stderr
    assert done.stderr == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_request_from_before_the_fork_does_not_hang_the_child(tiny_path: Path) -> None:
    """Its deltas will never come there; waiting without an end is the wrong answer."""
    body = """
    import warnings
    warnings.simplefilter("ignore")
    engine = Engine(PATH, **SETTINGS)
    handle = engine.submit(PROMPT, LONG)
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        try:
            said = handle.result().finish_reason
        except EngineDead as error:
            said = "dead"
        print("child", said, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("status", status)
    engine.close()
    """
    done = script(tiny_path, body)
    assert done.stdout.splitlines() in (["child error", "status 0"], ["child dead", "status 0"]), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_the_step_holds_its_lock(tiny_path: Path) -> None:
    """The lock stays taken in the child for ever; nothing there may wait for it."""
    body = """
    import warnings
    warnings.simplefilter("ignore")
    from pegboard import Part, hookimpl
    from pegboard_scheduling.continuous import ContinuousScheduler
    from pegboard_scheduling.options import ContinuousOptions

    inside = threading.Event()

    class Slow(ContinuousScheduler):
        def schedule(self):
            inside.set()
            time.sleep(0.5)
            return super().schedule()

    class Offers:
        @hookimpl
        def pegboard_parts(self):
            return [Part(role="scheduler", name="slow", factory=Slow, options=ContinuousOptions, summary="slow")]

    engine = Engine(PATH, plugins=[Offers()], scheduler="slow", **SETTINGS)
    handle = engine.submit(PROMPT, LONG)
    inside.clear()
    inside.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        try:
            engine.submit(PROMPT, GREEDY)
        except EngineDead:
            print("submit", flush=True)
        for name, call in (("abort", lambda: engine.abort(handle.id)), ("close", engine.close)):
            try:
                call()
            except EngineDead:
                pass
            print(name, flush=True)
        sys.exit(0)
    print("status", os.waitpid(child, 0)[1])
    engine.close()
    """
    done = script(tiny_path, body)
    assert (done.stdout.split(), done.stderr) == (["submit", "abort", "close", "status", "0"], "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_can_make_its_own(tiny_path: Path) -> None:
    body = """
    import warnings
    warnings.simplefilter("ignore")
    engine = Engine(PATH, **SETTINGS)
    right = engine.submit(PROMPT, GREEDY).result(timeout=20).token_ids
    child = os.fork()
    if child == 0:
        signal.alarm(15)
        with Engine(PATH, **SETTINGS) as own:
            print("child", own.submit(PROMPT, GREEDY).result(timeout=10).token_ids == right, flush=True)
        os._exit(0)
    print("status", os.waitpid(child, 0)[1])
    engine.close()
    """
    done = script(tiny_path, body)
    assert (done.stdout, done.stderr) == ("child True\nstatus 0\n", "")


def test_the_process_is_left_as_it_was(tiny_path: Path) -> None:
    """No logging setup, no signal handlers, no environment, no hooks, no torch settings, no output."""
    body = """
    def state():
        loggers = [logging.getLogger(), logging.getLogger("pegboard")]
        return {
            "handlers": [list(logger.handlers) for logger in loggers],
            "levels": [logger.level for logger in loggers],
            "propagate": [logger.propagate for logger in loggers],
            "disabled": logging.root.manager.disable,
            "signals": {s: signal.getsignal(s) for s in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}},
            "environment": dict(os.environ),
            "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace(), sys.getprofile()),
            "torch": (
                torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
                torch.initial_seed(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
            ),
            "random": torch.random.get_rng_state().tolist(),
            "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
            "folder": os.getcwd(),
            "switch": sys.getswitchinterval(),
            "threads": threading.active_count(),
        }

    before = state()
    with Engine(PATH, **SETTINGS) as engine:
        engine.generate([PROMPT] * 3, SamplingParams(seed=1, max_tokens=4))
        engine.submit([5], SamplingParams(max_tokens=4)).result(timeout=20)
    after = state()
    print([key for key in before if before[key] != after[key]])
    """
    done = script(tiny_path, body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_callers_modes_do_not_reach_the_step(tiny_path: Path, good: tuple[int, ...]) -> None:
    """Default dtype, grad mode and inference mode of the caller's thread are the caller's."""
    with torch.inference_mode():
        first = make(tiny_path)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        second = make(tiny_path)
        with first, second:
            for engine in (first, second):
                assert engine.submit(PROMPT, GREEDY).result(timeout=10).raise_for_error().token_ids == good
    finally:
        torch.set_default_dtype(before)
