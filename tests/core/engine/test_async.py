"""AsyncEngine: the same answers, a loop that never blocks, and requests that end with the task that asked for them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import (
    AsyncEngine,
    ConfigError,
    Delta,
    Engine,
    EngineDead,
    InvalidRequest,
    Part,
    QueueFull,
    SamplingParams,
    hookimpl,
)
from pegboard.contracts.cache import CacheManager
from pegboard_sampling.torch_sampler import TorchSampler
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


#: Prompts whose greedy tokens stand out, filled by `good`.
PROMPTS: list[list[int]] = []


def prompt(index: int) -> list[int]:
    return PROMPTS[index]


@pytest.fixture(scope="module")
def good(tiny_path: Path) -> list[tuple[int, ...]]:
    """Greedy ids of 50 prompts, by transformers; none of them a close call, which rounding might decide."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()
    tried = torch.tensor([[1 + i, 17, 42, 200 - i] for i in range(120)])
    ids, gap = tried, torch.full((120,), torch.inf)
    with torch.no_grad():
        for _ in range(8):
            best = model(ids).logits[:, -1].topk(2)
            gap = gap.minimum(best.values[:, 0] - best.values[:, 1])
            ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    clear = [i for i in range(120) if gap[i] > 1e-2][:50]
    assert len(clear) == 50
    PROMPTS[:] = [tried[i].tolist() for i in clear]
    return [tuple(ids[i, 4:].tolist()) for i in clear]


class Kit:
    """Steps that take `pace` seconds, and the cache manager at hand."""

    def __init__(self) -> None:
        self.pace = 0.0
        self.cache: Any = None

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        kit = self

        class Watched(ContinuousScheduler):
            @classmethod
            def create(cls, need: Any, options: Any, *, cache: CacheManager, clock: Callable[[], float]) -> Any:
                kit.cache = cache
                return super().create(need, options, cache=cache, clock=clock)

        class Slow(TorchSampler):
            def sample(self, logits: torch.Tensor, rows: Any) -> Any:
                time.sleep(kit.pace)
                return super().sample(logits, rows)

        return [
            Part(role="scheduler", name="watched", factory=Watched, options=ContinuousOptions, summary="for a test"),
            Part(role="sampler", name="slow", factory=Slow, summary="for a test"),
        ]


@pytest.fixture(scope="module")
def made_kit() -> Kit:
    return Kit()


@pytest.fixture(scope="module")
def made(tiny_path: Path, made_kit: Kit, good: Any) -> Iterator[Engine]:
    with Engine(
        tiny_path,
        device="cpu",
        max_rows=8,
        max_length=256,
        stream_buffer=8,
        plugins=[made_kit],
        scheduler="watched",
        sampler="slow",
    ) as engine:
        yield engine


@pytest.fixture
def kit(made_kit: Kit) -> Iterator[Kit]:
    yield made_kit
    made_kit.pace = 0.0


@pytest.fixture
def engine(made: Engine, kit: Kit) -> Iterator[AsyncEngine]:
    yield AsyncEngine(made)
    assert drained(made, kit)
    made.submit(prompt(0), GREEDY).result(timeout=10).raise_for_error()


def drained(engine: Engine, kit: Kit, seconds: float = 10.0) -> bool:
    """Whether nothing runs and every page is given back within `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        stats, cache = engine.stats(), kit.cache.stats()
        if not (stats.running or stats.waiting or stats.preempted or cache.held or cache.fenced):
            return True
        time.sleep(0.002)
    return False


def run(main: Awaitable[Any]) -> Any:
    """In a loop of its own, 20 s at most."""

    async def bounded() -> Any:
        return await asyncio.wait_for(main, 20)

    return asyncio.run(bounded())


async def collect(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


def ids_of(deltas: Sequence[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def test_generate(engine: AsyncEngine, good: Any) -> None:
    assert run(engine.generate(prompt(3), GREEDY)).raise_for_error().token_ids == good[3]


def test_stream(engine: AsyncEngine, good: Any) -> None:
    deltas = run(collect(engine.stream(prompt(3), GREEDY)))
    assert ids_of(deltas) == good[3]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]


@pytest.mark.supports("Engine", "AsyncEngine")
def test_fifty_at_once(engine: AsyncEngine, good: Any) -> None:
    """Half of them streamed, more than run at once."""

    async def one(index: int) -> tuple[int, ...]:
        if index % 2:
            return ids_of(await collect(engine.stream(prompt(index), GREEDY)))
        return (await engine.generate(prompt(index), GREEDY)).raise_for_error().token_ids

    async def main() -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*(one(i) for i in range(50))))

    assert run(main()) == good


def test_the_loop_is_never_blocked(engine: AsyncEngine, kit: Kit) -> None:
    """Steps of 300 ms, and a clock that ticks on the same loop every 5 ms."""
    kit.pace = 0.3

    async def main() -> float:
        worst = 0.0
        tasks = [asyncio.ensure_future(engine.generate(prompt(i), SamplingParams(max_tokens=3))) for i in range(3)]
        streams = [
            asyncio.ensure_future(collect(engine.stream(prompt(i), SamplingParams(max_tokens=3)))) for i in range(3)
        ]
        while not all(task.done() for task in [*tasks, *streams]):
            begin = time.monotonic()
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - begin)
        return worst

    assert run(main()) < 0.2


@pytest.mark.parametrize("kind", ["generate", "stream"])
@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.05])
def test_cancelling_the_task_aborts(engine: AsyncEngine, kit: Kit, kind: str, delay: float) -> None:
    """At once, while it is being admitted, or in the middle; its pages come back long before it would have ended."""
    kit.pace = 0.01

    async def main() -> None:
        work: Any = engine.generate(prompt(1), LONG) if kind == "generate" else collect(engine.stream(prompt(1), LONG))
        task = asyncio.ensure_future(work)
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)  # what a cancelled thread still admitted

    run(main())
    assert drained(engine.engine, kit, 1.0)


def test_a_loop_that_ends_while_a_thread_admits(engine: AsyncEngine, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancelled task is gone with its loop before the thread has made the request that nobody will take."""
    kit.pace = 0.01
    submit = engine.engine.submit

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return submit(*args, **options)

    monkeypatch.setattr(engine.engine, "submit", slowly)

    async def main() -> None:
        task = asyncio.ensure_future(collect(engine.stream(prompt(1), LONG)))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())
    assert drained(engine.engine, kit, 1.0)


def test_cancelling_what_waits_in_the_queue(engine: AsyncEngine, kit: Kit, good: Any) -> None:
    kit.pace = 0.01

    async def main() -> tuple[int, ...]:
        tasks = [asyncio.ensure_future(engine.generate(prompt(i), LONG)) for i in range(12)]
        last = asyncio.ensure_future(engine.generate(prompt(20), GREEDY))
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return (await last).raise_for_error().token_ids

    assert run(main()) == good[20]
    assert drained(engine.engine, kit, 1.0)


def test_wait_for_aborts_when_its_time_is_up(engine: AsyncEngine, kit: Kit) -> None:
    kit.pace = 0.01

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(prompt(1), LONG), 0.05)

    run(main())
    assert drained(engine.engine, kit, 1.0)


def test_leaving_the_loop_aborts(engine: AsyncEngine, kit: Kit) -> None:
    kit.pace = 0.01

    async def main() -> None:
        stream = engine.stream(prompt(1), LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        begin = time.monotonic()
        while engine.engine.stats().running and time.monotonic() - begin < 1.0:
            await asyncio.sleep(0.005)
        assert engine.engine.stats().running == 0

    run(main())


def test_a_stream_that_was_dropped_aborts(engine: AsyncEngine, kit: Kit) -> None:
    kit.pace = 0.01

    async def main() -> None:
        async for _ in engine.stream(prompt(1), LONG):
            break
        gc.collect(0)
        begin = time.monotonic()
        while engine.engine.stats().running and time.monotonic() - begin < 1.0:
            await asyncio.sleep(0.005)
        assert engine.engine.stats().running == 0

    run(main())


def test_a_slow_consumer_loses_nothing(engine: AsyncEngine, kit: Kit) -> None:
    """Eight pieces are buffered; then its request is paused, and others go on."""

    async def main() -> tuple[tuple[int, ...], tuple[int, ...]]:
        right = (await engine.generate(prompt(1), LONG)).token_ids
        taken: list[Delta] = []
        async for delta in engine.stream(prompt(1), LONG):
            taken.append(delta)
            if len(taken) == 3:
                begin = time.monotonic()
                while not engine.engine.stats().paused and time.monotonic() - begin < 5:
                    await asyncio.sleep(0.005)
                assert engine.engine.stats().paused == 1
                (await engine.generate(prompt(2), GREEDY)).raise_for_error()
        return ids_of(taken), right

    taken, right = run(main())
    assert taken == right


def test_a_loop_that_is_closed_early(engine: AsyncEngine, kit: Kit, good: Any) -> None:
    """asyncio.run cancels what is left; the engine serves the next loop."""
    kit.pace = 0.01
    tasks: list[asyncio.Future[Any]] = []

    async def main() -> None:
        tasks.extend(asyncio.ensure_future(collect(engine.stream(prompt(i), LONG))) for i in range(3))
        tasks.extend(asyncio.ensure_future(engine.generate(prompt(i), LONG)) for i in range(3))
        await asyncio.sleep(0.05)

    run(main())
    assert all(task.cancelled() for task in tasks)
    assert drained(engine.engine, kit, 1.0)
    assert run(engine.generate(prompt(5), GREEDY)).token_ids == good[5]


def test_a_loop_that_is_closed_without_a_word(engine: AsyncEngine, kit: Kit, good: Any) -> None:
    """Nothing is cancelled and nobody will ever listen again: the step's thread must not stumble over it."""
    kit.pace = 0.002
    loop = asyncio.new_event_loop()
    stream = engine.stream(prompt(1), LONG)
    loop.run_until_complete(stream.__anext__())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert run(engine.generate(prompt(5), GREEDY)).token_ids == good[5]
    with pytest.raises(StopIteration):
        stream.aclose().send(None)  # type: ignore[attr-defined]


def test_deadlines(engine: AsyncEngine, kit: Kit) -> None:
    kit.pace = 0.005

    async def main() -> None:
        output = await engine.generate(prompt(1), LONG, timeout=0.05)
        assert output.finish_reason == "deadline"
        deltas = await collect(engine.stream(prompt(1), LONG, timeout=0.05))
        assert deltas[-1].finish_reason == "deadline"
        assert 0 < len(ids_of(deltas)) < 200

    run(main())


@pytest.mark.parametrize("call", ["generate", "stream", "chat", "stream_chat"])
def test_bad_requests_raise_where_they_are_awaited(engine: AsyncEngine, call: str) -> None:
    async def main() -> None:
        bad: Any = [] if "chat" not in call else [{"role": "user", "content": "hi"}]
        made = getattr(engine, call)(bad, GREEDY)
        with pytest.raises(InvalidRequest):
            await (collect(made) if "stream" in call else made)

    run(main())


def test_several_samples(engine: AsyncEngine) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=6, ignore_eos=True)
    output = run(engine.generate(prompt(1), sampling))
    deltas = run(collect(engine.stream(prompt(1), sampling)))
    for completion in output.completions:
        own = [delta for delta in deltas if delta.index == completion.index]
        assert ids_of(own) == completion.token_ids
        assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]
    assert len(output.completions) == 4


def test_load_and_close(tiny_path: Path, good: Any) -> None:
    async def main() -> None:
        async with await AsyncEngine.load(tiny_path, device="cpu", max_rows=2, max_length=64) as engine:
            assert (await engine.generate(prompt(0), GREEDY)).token_ids == good[0]
        with pytest.raises(EngineDead, match="closed"):
            await engine.generate(prompt(0), GREEDY)
        await engine.close()
        config = {"model": str(tiny_path), "device": "cpu", "max_rows": 1, "max_length": 64}
        async with await AsyncEngine.from_config(config) as engine:
            assert (await engine.generate(prompt(0), GREEDY)).token_ids == good[0]
        with pytest.raises(ConfigError):
            await AsyncEngine.load(tiny_path, device="cpu", max_rows=0)

    run(main())


def test_closing_ends_what_is_awaited(tiny_path: Path, kit: Kit) -> None:
    kit.pace = 0.005

    async def main() -> None:
        settings = {"device": "cpu", "max_rows": 1, "max_length": 256, "plugins": [kit], "sampler": "slow"}
        engine = await AsyncEngine.load(tiny_path, **settings)
        tasks = [asyncio.ensure_future(engine.generate(prompt(i), LONG)) for i in range(2)]
        streams = [asyncio.ensure_future(collect(engine.stream(prompt(i), LONG))) for i in range(2)]
        await asyncio.sleep(0.05)
        await engine.close()
        for output in await asyncio.gather(*tasks):
            assert output.finish_reason == "error"
            assert "closed" in str(output.error)
        for deltas in await asyncio.gather(*streams):
            assert deltas[-1].finish_reason == "error"
            assert "closed" in str(deltas[-1].error)

    run(main())


def test_full_queue(tiny_path: Path, kit: Kit) -> None:
    kit.pace = 0.005

    async def main() -> None:
        settings = {"max_rows": 1, "max_queue": 2, "max_length": 256, "plugins": [kit], "sampler": "slow"}
        async with await AsyncEngine.load(tiny_path, device="cpu", **settings) as engine:
            sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
            results = await asyncio.gather(
                *(engine.generate(prompt(i), sampling) for i in range(10)), return_exceptions=True
            )
        full = [result for result in results if isinstance(result, QueueFull)]
        served = [result for result in results if not isinstance(result, BaseException)]
        assert len(full) + len(served) == 10
        assert full
        assert all(len(output.raise_for_error().token_ids) == 20 for output in served)

    run(main())
