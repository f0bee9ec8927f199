"""What a part raises fails the requests that it touched, gives their pages back; the engine goes on or dies loudly."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine, EngineDead, Part, RequestOutput, SamplingParams, hookimpl
from pegboard.contracts.cache import CacheManager
from pegboard.contracts.scheduler import Progress, StepPlan, StepResult
from pegboard.ops import TorchOps
from pegboard.runner import LocalExecutor
from pegboard_attention.torch_backend import TorchAttention
from pegboard_cache.options import PagedOptions
from pegboard_cache.paged import PagedCache
from pegboard_sampling.torch_sampler import TorchSampler
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions

NEW = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
#: A page of the tiny model in float32: 16 entries, K and V, 2 heads of 16, 3 layers.
PAGE = 16 * 2 * 2 * 16 * 4 * 3
PROMPTS = [[1 + i, 17, 42 + 3 * i, 200 - i, 3, *range(20, 20 + 4 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def good(tiny_path: Path) -> list[tuple[int, ...]]:
    """Greedy ids for each of the prompts, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(NEW):
                best = model(torch.tensor([ids])).logits[0, -1].topk(2)
                assert best.values[0] - best.values[1] > 1e-3, f"{prompt} is a close call: rounding might decide"
                ids.append(int(best.indices[0]))
            found.append(tuple(ids[len(prompt) :]))
    return found


class Trip:
    """Raises at the `at`-th call after it was armed, once."""

    def __init__(self, at: int = 1, error: type[BaseException] = RuntimeError) -> None:
        self.at, self.error = at, error
        self.armed = False
        self.calls = 0
        self.tripped = False
        #: Sequences of the plan or result that it was tripped in.
        self.touched: set[str] = set()

    def __call__(self, touched: Sequence[Any] = ()) -> None:
        if not self.armed or self.tripped:
            return
        self.calls += 1
        if self.calls >= self.at:
            self.tripped = True
            self.touched = {row.id for row in touched}
            raise self.error("the fuse has tripped")


class Kit:
    """A plugin object with a watched scheduler and whatever a test puts in. Keeps what the engine made."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.settings: dict[str, Any] = {"scheduler": "watched"}
        self.cache: Any = None
        self.scheduler: Any = None
        #: Rows of the last plan.
        self.planned: Sequence[Any] = ()
        kit = self

        class Watched(ContinuousScheduler):
            @classmethod
            def create(cls, need: Any, options: Any, *, cache: CacheManager, clock: Callable[[], float]) -> Any:
                kit.cache = cache
                kit.scheduler = super().create(need, options, cache=cache, clock=clock)
                return kit.scheduler

            def schedule(self) -> StepPlan | None:
                plan = super().schedule()
                if plan is not None:
                    kit.planned = plan.rows
                return plan

        self.watched: type[ContinuousScheduler] = Watched
        self.put("scheduler", "watched", Watched, ContinuousOptions)

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return self.parts

    def put(self, role: str, name: str, factory: Any, options: Any = None, setting: str | None = None) -> None:
        """Offer a part and choose it. A later one of the same role and name replaces the earlier."""
        self.parts = [part for part in self.parts if (part.role, part.name) != (role, name)]
        self.parts.append(Part(role=role, name=name, factory=factory, options=options, summary="for a test"))
        self.settings[setting or role] = name

    def check(self) -> None:
        """Everything is given back, at the latest after 10 s: an engine retires what flies before it rests."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            cache, stats = self.cache.stats(), self.scheduler.stats()
            if not (cache.held or cache.fenced or stats.running or stats.waiting or stats.preempted or stats.paused):
                break
            time.sleep(0.005)
        assert (cache.held, cache.fenced) == (0, 0)
        assert cache.free + cache.cached == cache.total
        assert (stats.running, stats.waiting, stats.preempted, stats.paused) == (0, 0, 0, 0)
        self.scheduler.check_integrity()
        self.cache.check_integrity()


def failing(base: type, method: str, before: Callable[..., None]) -> type:
    """`base` whose `method` calls `before` with its arguments first."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        return getattr(base, method)(self, *args, **kwargs)

    return type(f"Failing{base.__name__}", (base,), {method: wrapped})


def _schedule(kit: Kit, trip: Trip) -> None:
    kit.put("scheduler", "watched", failing(kit.watched, "schedule", lambda self: trip()), ContinuousOptions)


def _launch_part(role: str, base: type, method: str, setting: str | None = None) -> Callable[[Kit, Trip], None]:
    def install(kit: Kit, trip: Trip) -> None:
        part = failing(base, method, lambda self, *args, **kwargs: trip(kit.planned))
        kit.put(role, "faulty", part, setting=setting)

    return install


def _prefill_forward(kit: Kit, trip: Trip) -> None:
    _launch_part("attention", TorchAttention, "forward", "attention")(kit, trip)
    kit.settings["decode_attention"] = "torch"


def _retire(kit: Kit, trip: Trip) -> None:
    class Faulty(LocalExecutor):
        def retire(self, depth: int) -> StepResult | None:
            result = super().retire(depth)  # "If it raises, that step is gone."
            if result is not None:
                trip(result.rows)
            return result

    kit.put("executor", "faulty", Faulty)


def _commit(kit: Kit, trip: Trip) -> None:
    def before(self: Any, result: StepResult | None) -> None:
        if result is not None:
            trip(result.rows)

    kit.put("scheduler", "watched", failing(kit.watched, "commit", before), ContinuousOptions)


#: Where -> (how to put the fault in, at which call, the words of the message)
FAULTS: dict[str, tuple[Callable[[Kit, Trip], None], int, str]] = {
    "scheduler.schedule": (_schedule, 4, "scheduling"),
    "attention.plan": (_launch_part("attention", TorchAttention, "plan"), 4, "running a step"),
    "attention.forward": (_launch_part("attention", TorchAttention, "forward"), 11, "running a step"),
    "attention.forward, prefill only": (_prefill_forward, 5, "running a step"),
    "attention.forward, decode only": (
        _launch_part("attention", TorchAttention, "forward", "decode_attention"),
        8,
        "running a step",
    ),
    "ops.rope_write": (_launch_part("ops", TorchOps, "rope_write"), 8, "running a step"),
    "ops.embed": (_launch_part("ops", TorchOps, "embed"), 3, "running a step"),
    "sampler.open": (_launch_part("sampler", TorchSampler, "open"), 2, "running a step"),
    "sampler.sample": (_launch_part("sampler", TorchSampler, "sample"), 4, "running a step"),
    "executor.launch": (_launch_part("executor", LocalExecutor, "launch"), 4, "running a step"),
    "executor.retire": (_retire, 4, "reading a step's result"),
    "scheduler.commit": (_commit, 4, "committing a step"),
}


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def start(tiny_path: Path, kit: Kit, make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    def make(**settings: Any) -> Engine:
        common = {"device": "cpu", "max_rows": 2, "max_length": 64, "plugins": [kit]}
        return make_engine(tiny_path, **(common | kit.settings | settings))

    return make


def outputs(handles: Sequence[Any]) -> list[RequestOutput]:
    return [handle.result(timeout=8) for handle in handles]


def goes_on(engine: Engine, kit: Kit, good: Sequence[tuple[int, ...]]) -> None:
    """Twice: the second finds what the first left."""
    for _ in range(2):
        found = outputs([engine.submit(prompt, GREEDY) for prompt in PROMPTS])
        assert [output.error for output in found] == [None] * len(PROMPTS)
        assert [output.token_ids for output in found] == list(good)
    kit.check()


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("where", FAULTS)
def test_one_fault_ends_only_what_it_touched(
    start: Callable[..., Engine], kit: Kit, good: list[tuple[int, ...]], where: str, ahead: int
) -> None:
    install, at, doing = FAULTS[where]
    trip = Trip(at)
    install(kit, trip)
    engine = start(run_ahead=ahead)
    assert outputs([engine.submit(PROMPTS[0], GREEDY)])[0].token_ids == good[0]
    trip.armed = True
    handles = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    found = outputs(handles)
    assert trip.tripped
    failed = {id for h, o in zip(handles, found, strict=True) if o.finish_reason == "error" for id in h.indices}
    assert failed
    for output, right in zip(found, good, strict=True):
        if output.finish_reason == "error":
            assert "the fuse has tripped" in str(output.error)
            assert doing in str(output.error)
            assert output.token_ids == right[: len(output.token_ids)], "what was streamed before was right"
        else:
            assert (output.error, output.finish_reason, output.token_ids) == (None, "length", right)
    if where != "scheduler.schedule":  # it touches whatever is live
        assert failed == trip.touched
        assert len(failed) < len(PROMPTS)
    goes_on(engine, kit, good)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("where", ["scheduler.schedule", "executor.launch", "executor.retire", "scheduler.commit"])
def test_a_fault_at_every_step(
    start: Callable[..., Engine], kit: Kit, good: list[tuple[int, ...]], where: str, ahead: int
) -> None:
    """The k-th step of a load, for every k: prompt, decode, last token, a request that joins or leaves."""
    trip = Trip()
    FAULTS[where][0](kit, trip)
    engine = start(run_ahead=ahead, max_step_tokens=24)
    for at in range(1, 14):
        trip.at, trip.calls, trip.tripped, trip.armed = at, 0, False, True
        found = outputs([engine.submit(prompt, GREEDY) for prompt in PROMPTS[:4]])
        trip.armed = False
        for output, right in zip(found, good, strict=False):
            if output.error is None:
                assert output.token_ids == right
            else:
                assert "the fuse has tripped" in output.error
        kit.check()
    goes_on(engine, kit, good)


@pytest.mark.parametrize("method", ["schedule", "commit"])
def test_scheduler_that_raises_after_its_work(
    start: Callable[..., Engine], kit: Kit, good: list[tuple[int, ...]], method: str
) -> None:
    """The step that it planned is never launched; the progress that it made is lost. Nobody may wait for ever, and
    afterwards the engine works or says that it doesn't."""
    trip = Trip(3)

    def wrapped(self: Any, *args: Any) -> Any:
        found = getattr(kit.watched, method)(self, *args)
        if found:
            trip()
        return found

    kit.put("scheduler", "watched", type("Late", (kit.watched,), {method: wrapped}), ContinuousOptions)
    engine = start()
    trip.armed = True
    found = outputs([engine.submit(prompt, GREEDY) for prompt in PROMPTS])
    assert trip.tripped
    assert any(output.finish_reason == "error" for output in found)
    try:
        again = engine.submit(PROMPTS[0], GREEDY)
    except EngineDead as error:
        assert "fuse has tripped" in str(error)  # noqa: PT017  # dying loudly is the other right answer
    else:
        assert again.result(timeout=8).raise_for_error().token_ids == good[0]


def test_progress_lost_in_the_last_commit_of_a_request(start: Callable[..., Engine], kit: Kit) -> None:
    """The scheduler has forgotten the sequence, but its consumer has not been told."""

    def wrapped(self: Any, result: StepResult | None) -> tuple[Progress, ...]:
        found = kit.watched.commit(self, result)
        if any(progress.finish_reason for progress in found):
            trip()
        return found

    trip = Trip()
    kit.put("scheduler", "watched", type("Late", (kit.watched,), {"commit": wrapped}), ContinuousOptions)
    engine = start()
    trip.armed = True
    output = engine.submit(PROMPTS[0], GREEDY).result(timeout=10)
    assert output.finish_reason == "error"
    assert "fuse has tripped" in str(output.error)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("method", ["open", "reserve", "commit", "release", "take_changes"])
def test_cache_manager_that_raises(
    start: Callable[..., Engine], kit: Kit, good: list[tuple[int, ...]], method: str, ahead: int
) -> None:
    """Atomic by contract: what raised has changed nothing. Every page comes back, or the engine says that it died."""
    for at in (1, 3):
        trip = Trip(at)
        kit.put("cache", "faulty", failing(PagedCache, method, lambda self, *a, _t=trip, **k: _t()), PagedOptions)
        engine = start(run_ahead=ahead)
        trip.armed = True
        found = outputs([engine.submit(prompt, GREEDY) for prompt in PROMPTS[:3]])
        assert trip.tripped
        for output, right in zip(found, good, strict=False):
            assert output.token_ids == right if output.error is None else output.finish_reason == "error"
        try:
            engine.submit(PROMPTS[0], GREEDY).result(timeout=8)
        except EngineDead as error:
            assert "fuse has tripped" in str(error)  # noqa: PT017
        else:
            goes_on(engine, kit, good)
        engine.close()


def test_samples_that_shared_a_failed_prompt(
    start: Callable[..., Engine], kit: Kit, good: list[tuple[int, ...]]
) -> None:
    """n > 1: the children fork from the first; each ends once, and pages that they share come back."""
    for at in range(1, 6):
        trip = Trip(at)
        kit.put("sampler", "faulty", failing(TorchSampler, "sample", lambda self, *a, _t=trip: _t(kit.planned)))
        engine = start(run_ahead=1, max_rows=4)
        trip.armed = True
        many = engine.submit(PROMPTS[5], SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, n=4))
        completions = many.result(timeout=8).completions
        assert [c.index for c in completions] == [0, 1, 2, 3]
        for completion in completions:
            failed = completion.finish_reason == "error"
            assert completion.token_ids == (good[5][: len(completion.token_ids)] if failed else good[5])
        goes_on(engine, kit, good)
        engine.close()


# -- one row only


class Poisoned(TorchSampler):
    """NaN logits for the requests whose prompt begins with `victim`, from their `at`-th token on."""

    victim, at = 0, 0

    def open(self, openings: Sequence[Any]) -> None:
        self._begin = getattr(self, "_begin", {}) | {o.slot: (o.prompt[0], len(o.prompt)) for o in openings}
        super().open(openings)

    def sample(self, logits: torch.Tensor, rows: Any) -> Any:
        logits = logits.clone()
        for row, (slot, position) in enumerate(zip(rows.host_slots, rows.positions.tolist(), strict=True)):
            first, length = self._begin[slot]
            if first == self.victim and position - length >= self.at:
                logits[row, 7] = math.nan
        return super().sample(logits, rows)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 3])
def test_nan_in_one_row(
    start: Callable[..., Engine], kit: Kit, good: list[tuple[int, ...]], at: int, ahead: int
) -> None:
    kit.put("sampler", "poisoned", type("Victim", (Poisoned,), {"victim": PROMPTS[2][0], "at": at}))
    engine = start(run_ahead=ahead, max_rows=4)
    found = outputs([engine.submit(prompt, GREEDY) for prompt in PROMPTS])
    assert [output.finish_reason for output in found] == ["length"] * 2 + ["error"] + ["length"] * 3
    assert "NaN" in str(found[2].error)
    assert found[2].token_ids == good[2][:at]
    assert [output.token_ids for i, output in enumerate(found) if i != 2] == [*good[:2], *good[3:]]
    kit.check()
    # The slots that it had serve others.
    others = [prompt for i, prompt in enumerate(PROMPTS) if i != 2]
    assert [o.token_ids for o in outputs([engine.submit(p, GREEDY) for p in others])] == [*good[:2], *good[3:]]


def test_nan_left_in_the_cache_hurts_nobody(
    start: Callable[..., Engine], kit: Kit, good: list[tuple[int, ...]]
) -> None:
    """Pages full of NaN are handed on: entries beyond a row's own must not matter."""
    poison = Trip()  # armed: poison

    def before(self: Any, qkv: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if poison.armed:
            qkv.fill_(math.nan)

    kit.put("ops", "poisoned", failing(TorchOps, "rope_write", before))
    engine = start(max_rows=1, max_length=64, kv_memory=5 * PAGE)
    poison.armed = True
    long = [100 + i for i in range(50)]
    output = outputs([engine.submit(long, SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True))])[0]
    assert output.finish_reason == "error"
    poison.armed = False
    goes_on(engine, kit, good)


def test_a_prefix_that_failed_is_not_reused(tiny_path: Path, start: Callable[..., Engine], kit: Kit) -> None:
    """A fault that passes (a flipped bit) must not stay in the prefix cache: the same prompt works the next time."""
    poison = Trip()

    def before(self: Any, qkv: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if poison.armed:
            qkv.fill_(math.nan)

    kit.put("ops", "poisoned", failing(TorchOps, "rope_write", before))
    engine = start(max_step_tokens=16)  # the first chunks choose no token, so nothing notices
    prompt = [100 + i for i in range(40)]
    poison.armed = True
    assert outputs([engine.submit(prompt, GREEDY)])[0].finish_reason == "error"
    poison.armed = False
    outputs([engine.submit(prompt, GREEDY)])[0].raise_for_error()


# -- text


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_detokenizer_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Kit, make_engine: Callable[..., Engine], ahead: int
) -> None:
    from pegboard.text import IncrementalDetokenizer

    engine = make_engine(
        _with_tokenizer(tmp_path), device="cpu", plugins=[kit], max_rows=2, run_ahead=ahead, **kit.settings
    )
    right = [output.token_ids for output in outputs([engine.submit(prompt, GREEDY) for prompt in PROMPTS])]
    push, calls = IncrementalDetokenizer.push, [0]

    def faulty(self: Any, ids: Any) -> str:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("the fuse has tripped")
        return push(self, ids)

    monkeypatch.setattr(IncrementalDetokenizer, "push", faulty)
    found = outputs([engine.submit(prompt, GREEDY) for prompt in PROMPTS])
    failed = [i for i, output in enumerate(found) if output.error is not None]
    assert len(failed) == 1
    assert "the fuse has tripped" in str(found[failed[0]].error)
    assert "text" in str(found[failed[0]].error)
    assert found[failed[0]].finish_reason == "error"
    assert [o.token_ids for i, o in enumerate(found) if i not in failed] == [
        r for i, r in enumerate(right) if i not in failed
    ]
    kit.check()
    assert [o.token_ids for o in outputs([engine.submit(p, GREEDY) for p in PROMPTS])] == right


def test_an_id_used_again_after_its_text_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., Engine]
) -> None:
    """From an observer, so at the very moment that the id is free: the new request gets nothing of the old one's."""
    from pegboard.text import IncrementalDetokenizer

    again: list[Any] = []

    class Resubmits:
        @classmethod
        def refusals(cls, need: None, options: Any) -> Sequence[str]:
            return []

        @classmethod
        def create(cls, need: None, options: Any) -> Any:
            return cls()

        @hookimpl
        def pegboard_request_finished(self, event: Any) -> None:
            if event.finish_reason == "error" and not again:
                again.append(engine.submit(PROMPTS[0], GREEDY, id="mine"))

    class Observing:
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            return [Part(role="observer", name="resubmits", factory=Resubmits, summary="for a test")]

    engine = make_engine(_with_tokenizer(tmp_path), device="cpu", plugins=[Observing()], observers=["resubmits"])
    right = outputs([engine.submit(PROMPTS[0], GREEDY)])[0].token_ids
    push, calls = IncrementalDetokenizer.push, [0]

    def faulty(self: Any, ids: Any) -> str:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("the fuse has tripped")
        return push(self, ids)

    monkeypatch.setattr(IncrementalDetokenizer, "push", faulty)
    deltas = list(engine.submit(PROMPTS[0], GREEDY, id="mine"))  # each is made when it is there
    assert [delta.finish_reason for delta in deltas] == [None, "error"]
    until = time.monotonic() + 10
    while not again and time.monotonic() < until:
        time.sleep(0.005)
    assert outputs(again)[0].raise_for_error().token_ids == right


def _with_tokenizer(folder: Path) -> Path:
    """A model with a byte-level tokenizer without merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from pegboard.testing.tiny import tiny_model

    path = tiny_model(folder / "m", vocab_size=256, tokenizer=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


# -- what can't be contained


@pytest.fixture
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What threads let out, which pytest would report as a warning."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    return seen


def dies_loudly(engine: Engine, handles: Sequence[Any], cause: str) -> None:
    found = outputs(handles)
    assert all(output.finish_reason == "error" for output in found)
    assert all(cause in str(output.error) for output in found)
    with pytest.raises(EngineDead, match=cause):
        engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(EngineDead, match=cause):
        engine.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineDead, match=cause):
        list(engine.stream(PROMPTS[0], GREEDY))
    assert all(engine.abort(handle.id) is False for handle in handles)
    engine.close()
    with pytest.raises(EngineDead, match=cause):  # closing does not hide it
        engine.submit(PROMPTS[0], GREEDY)
    names = [thread.name for thread in threading.enumerate()]
    assert "pegboard-step" not in names


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("where", ["scheduler.schedule", "executor.launch", "executor.retire", "scheduler.commit"])
def test_damaged_state_ends_the_engine(start: Callable[..., Engine], kit: Kit, where: str, ahead: int) -> None:
    trip = Trip(3)
    FAULTS[where][0](kit, trip)

    def broken(self: Any) -> None:
        raise AssertionError("page 7 is nowhere")

    base: Any = next(part.factory for part in kit.parts if part.role == "scheduler")
    kit.put("scheduler", "watched", type("Damaged", (base,), {"check_integrity": broken}), ContinuousOptions)
    engine = start(run_ahead=ahead)
    # More than run at once, and one that nobody listens to; all of them long enough to be there when it happens.
    handles = [
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)) for prompt in PROMPTS
    ]
    trip.armed = True
    dies_loudly(engine, handles, "page 7 is nowhere")
    assert trip.tripped


@pytest.mark.parametrize("method", ["fail", "has_work", "finish"])
def test_scheduler_that_can_not_go_on(start: Callable[..., Engine], kit: Kit, method: str) -> None:
    """fail: a failed step can't be taken back; has_work: asked outside any phase; finish: nothing can be ended."""
    broken = Trip()
    base = failing(kit.watched, method, lambda self, *args: broken())
    if method == "fail":
        kit.put("sampler", "faulty", failing(TorchSampler, "sample", lambda self, *a: trip()))
    if method == "finish":
        base = failing(base, "schedule", lambda self: trip())
    trip = Trip(3)
    kit.put("scheduler", "watched", base, ContinuousOptions)
    engine = start()
    handles = [
        engine.submit(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)) for _ in range(3)
    ]
    broken.armed = trip.armed = True
    if method == "has_work":  # asked when there is nothing to do
        outputs(handles)
        until = time.monotonic() + 10
        while not broken.tripped and time.monotonic() < until:
            time.sleep(0.005)
        handles = []
        time.sleep(0.05)
    dies_loudly(engine, handles, "fuse has tripped")


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_no_exception_leaves_nobody_waiting(
    start: Callable[..., Engine], kit: Kit, quiet_threads: list[Any], error: type[BaseException]
) -> None:
    """A part that calls sys.exit() takes the step's thread with it: streams end all the same."""
    trip = Trip(2, error)
    kit.put("sampler", "faulty", failing(TorchSampler, "sample", lambda self, *a: trip(kit.planned)))
    engine = start()
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    handles = [engine.submit(prompt, long) for prompt in PROMPTS[:3]]
    trip.armed = True
    found = outputs(handles)
    assert trip.tripped
    assert any(output.finish_reason == "error" for output in found)
    try:
        again = engine.submit(PROMPTS[0], GREEDY)
    except EngineDead:
        pass
    else:
        assert len(again.result(timeout=10).raise_for_error().token_ids) == NEW


def test_memory_error_is_a_fault_like_any_other(
    start: Callable[..., Engine], kit: Kit, good: list[tuple[int, ...]]
) -> None:
    trip = Trip(3, MemoryError)
    kit.put("ops", "faulty", failing(TorchOps, "project", lambda self, *a, **k: trip()))
    engine = start()
    trip.armed = True
    found = outputs([engine.submit(prompt, GREEDY) for prompt in PROMPTS])
    assert any("MemoryError" in str(output.error) for output in found)
    goes_on(engine, kit, good)
