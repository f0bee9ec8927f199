"""Everything at once, for long: random requests, readers that leave or lag, aborts, deadlines, and parts that fail.

Two engines in one process, one of them running ahead. Every request ends once; who was not hurt gets the tokens that
it gets alone; at each rest nothing is held any more: no page, no slot, no thread, no file, no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from pegboard import (
    AsyncEngine,
    Completion,
    Delta,
    Engine,
    Part,
    QueueFull,
    Request,
    RequestOutput,
    SamplingParams,
    hookimpl,
)
from pegboard.contracts.cache import CacheManager
from pegboard.contracts.observer import RequestAdmitted, RequestFinished
from pegboard.contracts.scheduler import StepResult
from pegboard.ops import TorchOps
from pegboard.runner import LocalExecutor
from pegboard.streams import Handle, Stream
from pegboard.testing.tiny import tiny_model
from pegboard_attention.torch_backend import TorchAttention
from pegboard_sampling.torch_sampler import TorchSampler
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions

#: float64: 16 entries, K and V, 2 heads of 16, 2 layers.
PAGE = 16 * 2 * 2 * 16 * 8 * 2
LIMITS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_length": 128,
    "max_rows": 6,
    "max_queue": 24,
    "max_step_tokens": 64,
    "stream_buffer": 4,
}
#: Few enough for preemption: the longest request takes 8.
PAGES = 14
READERS = 4
#: What may stay behind after the warm-up, over the whole run: allocators round and keep.
GROWTH = 4 << 20


class Template(msgspec.Struct, frozen=True):
    """A request, and what comes of it when it runs alone."""

    request: Request
    alone: RequestOutput


class Faults:
    """Raises now and then. Called by the step's thread only."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rate = 0.0
        self.seen: Counter[str] = Counter()

    def strikes(self, what: str, times: float = 1.0) -> bool:
        struck = self.random.random() < self.rate * times
        self.seen[what] += struck
        return struck

    def __call__(self, what: str, times: float = 1.0) -> None:
        if self.strikes(what, times):
            raise RuntimeError(f"soak: {what}")


class Plugin:
    """Parts that fail as `faults` says. Keeps what the engine made."""

    def __init__(self, faults: Faults) -> None:
        self.cache: Any = None
        self.scheduler: Any = None
        plugin = self

        class Watched(ContinuousScheduler):
            @classmethod
            def create(cls, need: Any, options: Any, *, cache: CacheManager, clock: Callable[[], float]) -> Any:
                plugin.cache = cache
                plugin.scheduler = super().create(need, options, cache=cache, clock=clock)
                return plugin.scheduler

        class Ops(TorchOps):
            def embed(self, *args: Any, **kwargs: Any) -> Any:
                faults("model")
                return super().embed(*args, **kwargs)

        class Attention(TorchAttention):
            def plan(self, *args: Any, **kwargs: Any) -> Any:
                faults("attention.plan")
                return super().plan(*args, **kwargs)

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                faults("attention.forward", 0.3)  # there are many
                return super().forward(*args, **kwargs)

        class Sampler(TorchSampler):
            def open(self, openings: Sequence[Any]) -> None:
                faults("sampler.open")
                super().open(openings)

            def sample(self, logits: torch.Tensor, rows: Any) -> Any:
                faults("sampler.sample")
                if faults.strikes("NaN", 3):
                    logits[faults.random.randrange(len(logits)), 5] = math.nan
                return super().sample(logits, rows)

        class Executor(LocalExecutor):
            def retire(self, depth: int) -> StepResult | None:
                result = super().retire(depth)
                if result is not None:
                    faults("executor.retire")
                return result

        self.parts = [
            Part(role="scheduler", name="soak", factory=Watched, options=ContinuousOptions, summary="for a test"),
            Part(role="ops", name="soak", factory=Ops, summary="for a test"),
            Part(role="attention", name="soak", factory=Attention, summary="for a test"),
            Part(role="sampler", name="soak", factory=Sampler, summary="for a test"),
            Part(role="executor", name="soak", factory=Executor, summary="for a test"),
        ]

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return self.parts

    @property
    def settings(self) -> dict[str, Any]:
        return {part.role: part.name for part in self.parts} | {"plugins": [self]}


class Books:
    """An observer: what began and what ended since the last rest. Hooks come from the step's thread."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[tuple[str, int]] = Counter()
        self.ends: Counter[str] = Counter()

    @hookimpl
    def pegboard_request_admitted(self, event: RequestAdmitted) -> None:
        self.begun[event.id] += 1

    @hookimpl
    def pegboard_request_finished(self, event: RequestFinished) -> None:
        self.ended[event.id, event.index] += 1
        self.ends[event.finish_reason] += 1

    def rest(self) -> None:
        began, ended = set(self.begun), {id for id, _ in self.ended}
        assert began == ended, f"never ended: {began - ended}; never began: {ended - began}"
        assert set(self.begun.values()) <= {1}, "admitted twice"
        assert set(self.ended.values()) <= {1}, "ended twice"
        self.begun.clear()
        self.ended.clear()


class Raising:
    """An observer that fails in the middle of things, and is dropped."""

    def __init__(self) -> None:
        self.calls = 0

    @hookimpl
    def pegboard_request_finished(self, event: RequestFinished) -> None:
        self.calls += 1
        if self.calls == 20:
            raise RuntimeError("soak: observer")


class Soak:
    """One engine and those who use it."""

    def __init__(self, path: Path, templates: Sequence[Template], ahead: int) -> None:
        self.templates = templates
        self.faults = Faults(ahead)
        self.plugin = Plugin(self.faults)
        self.books, self.raising = Books(), Raising()
        watchers = [self.raising, self.books]
        settings = LIMITS | self.plugin.settings | {"run_ahead": ahead, "kv_memory": PAGES * PAGE}
        self.engine = Engine(path, watchers=watchers, **settings)
        self.until = 0.0
        self.wrong: list[str] = []
        self.whole = 0
        self.started = 0
        #: Live handles of the readers, and ids that somebody has aborted.
        self.live: dict[str, Handle] = {}
        self.aborted: set[str] = set()
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(READERS + 3)
        ways = [(self.read, seed) for seed in range(READERS)] + [(self.abort, 100), (self.run_tasks, 101)]
        self.threads = [threading.Thread(target=self.act, args=(way, 1000 * ahead + seed)) for way, seed in ways]
        for thread in self.threads:
            thread.start()

    def act(self, way: Callable[[Random], None], seed: int) -> None:
        random = Random(seed)
        with contextlib.suppress(threading.BrokenBarrierError):  # it is over
            while True:
                self.barrier.wait()
                while time.monotonic() < self.until and not self.wrong:
                    try:
                        way(random)
                    except Exception:
                        self.wrong.append(traceback.format_exc())
                self.barrier.wait()

    def choose(self, random: Random) -> tuple[Template, Request]:
        template = random.choice(self.templates)
        timeout = random.uniform(0.001, 0.3) if random.random() < 0.15 else None
        salt = random.choice(["", "", "other"])
        return template, msgspec.structs.replace(
            template.request, priority=random.randint(-1, 1), timeout=timeout, salt=salt
        )

    # -- threads

    def read(self, random: Random) -> None:
        if random.random() < 0.1:
            chosen = [self.choose(random) for _ in range(random.randint(0, 8))]
            outputs = self.engine.generate([request for _, request in chosen])
            for (template, request), output in zip(chosen, outputs, strict=True):
                self.judge_output(template, request, output, False)
            return
        template, request = self.choose(random)
        try:
            handle = self.engine.submit(request)
        except QueueFull:
            time.sleep(0.01)
            return
        with self.lock:
            self.live[handle.id] = handle
        way = random.choice(["result", "all", "slow", "leave", "drop"])
        if way != "result":
            stream, count = Stream(handle), random.randint(0, 12)
            for taken, _ in enumerate(stream):
                if way == "slow":
                    time.sleep(random.choice([0, 0, 0.001, 0.02]))
                elif way in ("leave", "drop") and taken == count:
                    with self.lock:
                        self.aborted.add(handle.id)
                    break
            if way == "leave":
                with self.lock:
                    self.aborted.add(handle.id)
                stream.close()
            elif way == "drop" and handle.live:
                with self.lock:
                    self.aborted.add(handle.id)
            del stream
        output = handle.result(timeout=60)
        with self.lock:
            del self.live[handle.id]
            was_aborted = handle.id in self.aborted
            self.aborted.discard(handle.id)
        self.judge(template, request, handle._record, was_aborted)
        assert [c.index for c in output.completions] == list(range(request.sampling.n))

    def abort(self, random: Random) -> None:
        with self.lock:
            id = random.choice(list(self.live)) if self.live else None
            if id is not None and random.random() < 0.2:
                self.aborted.add(id)
            else:
                id = None
        if id is not None:
            self.engine.abort(id)
        self.engine.stats()
        time.sleep(random.uniform(0, 0.05))

    def run_tasks(self, random: Random) -> None:
        """An event loop with a few tasks, some of which are cancelled at any point."""

        async def one() -> None:
            template, request = self.choose(random)
            deltas: list[Delta] = []
            try:
                if random.random() < 0.3:
                    self.judge_output(template, request, await AsyncEngine(self.engine).generate(request), False)
                    return
                async for delta in AsyncEngine(self.engine).stream(request):
                    deltas.append(delta)
                    if random.random() < 0.05:
                        await asyncio.sleep(0.01)
            except QueueFull:
                await asyncio.sleep(0.01)
                return
            self.judge(template, request, deltas, False)

        async def main() -> None:
            tasks = [asyncio.create_task(one()) for _ in range(random.randint(1, 4))]
            for task in tasks:
                if random.random() < 0.3:
                    await asyncio.sleep(random.uniform(0, 0.05))
                    task.cancel()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, Exception):  # being cancelled is none
                    raise found

        asyncio.run(main())

    # -- what is right

    def judge(self, template: Template, request: Request, deltas: Sequence[Delta], aborted: bool) -> None:
        self.started += 1
        for expected in template.alone.completions:
            own = [delta for delta in deltas if delta.index == expected.index]
            ends = [delta.finish_reason for delta in own if delta.finish_reason is not None]
            assert len(ends) == 1, f"ends of one continuation: {ends}"
            assert own[-1].finish_reason == ends[0], "something came after the end"
            found = Completion(
                index=expected.index,
                text="".join(delta.text for delta in own),
                token_ids=tuple(token for delta in own for token in delta.token_ids),
                finish_reason=own[-1].finish_reason,
                metrics=own[-1].metrics,
                error=own[-1].error,
            )
            self.compare(found, expected, request, aborted)

    def judge_output(self, template: Template, request: Request, output: RequestOutput, aborted: bool) -> None:
        self.started += 1
        for found, expected in zip(output.completions, template.alone.completions, strict=True):
            self.compare(found, expected, request, aborted)

    def compare(self, found: Completion, expected: Completion, request: Request, aborted: bool) -> None:
        reason, tokens = found.finish_reason, found.token_ids
        assert tokens == expected.token_ids[: len(tokens)], f"{tokens} differ from {expected.token_ids}"
        if reason in ("stop", "length"):
            assert (reason, tokens) == (expected.finish_reason, expected.token_ids)
            assert found.text == expected.text
            self.whole += 1
        elif reason == "error":
            assert "soak: " in str(found.error) or "NaN" in str(found.error), found.error
        elif reason == "deadline":
            assert request.timeout is not None
        else:
            assert (reason, aborted) == ("abort", True)

    def rest(self) -> None:
        """Nobody asks for anything: everything must have been given back, at the latest after 10 s."""
        engine = self.engine
        # Events come in order: when the last one of this is there, those of all others are.
        self.faults.rate = 0.0
        last = engine.submit([1], SamplingParams(max_tokens=1))
        last.result(timeout=60)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            cache, stats = self.plugin.cache.stats(), engine.stats()
            busy = stats.running or stats.waiting or stats.preempted or stats.paused or cache.fenced
            if not (busy or cache.held or engine._handles) and self.books.ended[last.id, 0]:
                break
            time.sleep(0.005)
        assert (cache.held, cache.fenced) == (0, 0)
        assert cache.free + cache.cached == cache.total
        assert (stats.running, stats.waiting, stats.preempted, stats.paused) == (0, 0, 0, 0)
        with engine._phases.lock:
            self.plugin.scheduler.check_integrity()
            self.plugin.cache.check_integrity()
        assert not engine._handles
        assert not engine._by_sequence
        assert not engine._phases.live
        assert not engine._phases._flying
        assert not engine._emitter._live
        assert not engine._emitter._stopped
        assert not self.live
        self.books.rest()
        self.aborted.clear()

    def round(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.barrier.wait()

    def join(self) -> None:
        """Once the round is over."""
        self.barrier.wait(timeout=90)
        assert not self.wrong, self.wrong[0]
        self.rest()

    def stop(self) -> None:
        self.barrier.abort()
        for thread in self.threads:
            thread.join()


def measured() -> tuple[int, int, int]:
    """Threads, open files, resident bytes."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), resident


def slope(values: Sequence[float]) -> float:
    """By least squares, a step of the index."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    across = sum((index - middle) ** 2 for index in range(len(values)))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / across


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tiny_model(tmp_path_factory.mktemp("soak") / "m", vocab_size=256, num_hidden_layers=2, tokenizer=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def templates(path: Path) -> list[Template]:
    """Each run alone in an engine of good parts with room enough."""
    random, found = Random(11), []
    with Engine(path, **LIMITS) as engine:
        for index in range(40):
            prompt = [random.randrange(3, 256) for _ in range(random.choice([1, 3, 8, 17, 40, 60]))]
            if index % 4 == 0:
                prompt = [7] * 20 + prompt  # a prefix that many share
            sampling = SamplingParams(
                max_tokens=random.choice([1, 2, 5, 12, 25, 40]),
                temperature=random.choice([0.0, 0.0, 0.7, 1.3]),
                top_k=random.choice([0, 0, 5]),
                top_p=random.choice([1.0, 0.8]),
                min_p=random.choice([0.0, 0.05]),
                repetition_penalty=random.choice([1.0, 1.2]),
                frequency_penalty=random.choice([0.0, 0.5]),
                seed=random.randrange(1 << 40),
                n=random.choice([1, 1, 1, 3]),
                ignore_eos=random.random() < 0.5,
                logprobs=random.choice([None, None, 2]),
                prompt_logprobs=random.choice([None, None, None, 1]),
            )
            request = Request(prompt=prompt, sampling=sampling)
            alone = engine.generate(request).raise_for_error()
            text = alone.completions[0].text
            # Of whole characters: one that is cut short by an abort, shown as U+FFFD, would stop it there.
            pieces = [text[at : at + 2] for at in range(1, len(text) - 2) if "\ufffd" not in text[at : at + 2]]
            if index % 2 == 0 and pieces:
                stop = (random.choice(pieces), "never found")
                sampling = msgspec.structs.replace(sampling, stop=stop, include_stop=random.random() < 0.5)
                request = Request(prompt=prompt, sampling=sampling)
                alone = engine.generate(request).raise_for_error()
            found.append(Template(request, alone))
    assert sum(bool(t.request.sampling.stop) for t in found) >= 4
    assert {c.finish_reason for t in found for c in t.alone.completions} == {"stop", "length"}
    return found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A record a fault, kept with its traceback by pytest, would be the growth that is looked for."""
    logger = logging.getLogger("pegboard")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("seconds", "round_seconds"), [(6.0, 1.0), pytest.param(600.0, 10.0, marks=pytest.mark.full)], ids=["short", "long"]
)
@pytest.mark.long
def test_soak(path: Path, templates: list[Template], seconds: float, round_seconds: float) -> None:
    soaks = [Soak(path, templates, ahead) for ahead in (0, 2)]
    history = []
    try:
        for number in range(round(seconds / round_seconds)):
            for soak in soaks:
                soak.faults.rate = 0.0 if number % 4 == 3 else 0.004
                soak.round(round_seconds)
            for soak in soaks:
                soak.join()
            history.append(measured())
        report = {
            "resident MB": [round(resident / 1e6, 2) for _, _, resident in history],
            "requests": [soak.started for soak in soaks],
            "whole": [soak.whole for soak in soaks],
            "ends": [dict(soak.books.ends) for soak in soaks],
            "faults": [dict(soak.faults.seen) for soak in soaks],
            "preemptions": [soak.engine.stats().preemptions_total for soak in soaks],
        }
        print(report)
        for soak in soaks:
            assert soak.raising.calls == 20, "it was told nothing after it had raised"
            assert soak.engine.stats().preemptions_total > 0
            assert sum(soak.faults.seen.values()) > 0
            assert soak.whole > soak.started / 4
            assert {"stop", "length", "error", "abort", "deadline"} <= set(soak.books.ends)
        warm = history[len(history) // 5 :]
        assert {threads for threads, _, _ in warm} == {warm[0][0]}
        assert {files for _, files, _ in warm} == {warm[0][1]}
        if seconds > 60:
            grown = slope([resident for _, _, resident in warm]) * len(warm)
            assert grown < GROWTH, f"{grown / 1e6:.1f} MB more at the end: {report['resident MB']}"
        last = [soak.engine.submit(templates[0].request) for soak in soaks for _ in range(10)]
        for soak in soaks:
            soak.engine.close()
        for handle in last:
            ends = [delta for delta in handle._record if delta.finish_reason is not None]
            assert len(ends) == len(handle.indices)
    finally:
        for soak in soaks:
            soak.engine.close()
            soak.stop()
