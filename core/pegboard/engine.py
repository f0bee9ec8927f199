"""Engine: submit, step, generate, stream, close. One thread owns the step; everything public is safe from any."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self, overload

from msgspec.structs import asdict, replace

from .assembly import assemble, engine_config
from .best_of import BestOf
from .config import EngineConfig
from .contracts.observer import EngineReady, RequestAdmitted, RequestFinished, StepDone
from .contracts.sampler import SamplingParams
from .contracts.scheduler import Progress, StepResult
from .emitter import Emission, Emitter
from .errors import EngineDead, InvalidRequest, PegboardError
from .phases import Phases
from .registry.registry import Registry
from .request import Delta, Prompt, Request, RequestOutput, check_options, check_request
from .shadow.totals import ShadowTotals, count_shadow
from .speculation import SpeculationStats, add_drafts
from .stats import EngineStats
from .stopwatch import Stopwatch
from .streams import Handle, Stream
from .text import IncrementalDetokenizer, StopMatcher, Tokenizer, encode_chat, render_prompt

logger = logging.getLogger("pegboard")

#: Seconds; a wait without end or with a huge one is not what a lock can do.
_LONGEST_SLEEP = 3600.0

#: A chat message: {"role": ..., "content": ...}
Message = Mapping[str, Any]


class Engine:
    """An assembled engine. Use it as a context manager, or call `close`.

    >>> with Engine("smollm2-135m-instruct") as engine:  # doctest: +SKIP
    ...     print(engine.chat([{"role": "user", "content": "Hello"}]).text)
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        plugins: Sequence[object] | Mapping[str, Any] = (),
        watchers: Sequence[object] = (),
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        """`model` and `settings` are fields of EngineConfig and override `config` (a file, a mapping or a config).

        `plugins` are plugin objects to use besides the installed ones (or the config's field, {"allow": [...]});
        `watchers` are observers of the caller's own (any object with `@hookimpl` methods of `ObserverSpec`), beside
        those that the config names;
        `progress(bytes done, bytes in all)` is called while weights load.
        ConfigError, CheckpointError, PluginError: it cannot work, with all reasons.
        """
        self._begin = time.monotonic()
        if isinstance(plugins, Mapping):  # the config's field of that name
            settings["plugins"], plugins = plugins, ()
        loaded = engine_config(model, config, settings)
        assembled = assemble(loaded, self._discover(plugins), plugins)
        self.config = loaded
        self.plan = assembled.plan
        self.decisions = assembled.decisions
        self._admission = assembled.admission()
        logger.info("memory: %s", self.plan.memory.text())
        scheduler, executor, self._observers = assembled.build(time.monotonic, progress, watchers)
        self._shadow: ShadowTotals | None = None
        if loaded.shadow is not None:
            executor, self._shadow = count_shadow(executor, self.plan.parts)
        self._speculation = None if loaded.speculator is None else SpeculationStats()
        self._phases = Phases(scheduler, executor, self.plan.depth)
        self._emitter = Emitter(time.monotonic, self._phases.finish)
        self._pid = os.getpid()
        self._serials = itertools.count(1)
        self._handles: dict[str, Handle] = {}
        #: Admissions that observers have not been told of: the step's thread does.
        self._admitted: deque[RequestAdmitted] = deque()
        self._by_sequence: dict[str, Handle] = {}
        self._dead: EngineDead | None = None
        self._closing, self._closed = threading.RLock(), False
        #: Wakes the engine's thread. A SimpleQueue, since its `put` may be called from a destructor.
        self._bell: SimpleQueue[None] = SimpleQueue()
        #: Requests whose stream was dropped: the engine's thread ends them.
        self._dropped: deque[str] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._bell, self._stopping), name="pegboard-step", daemon=True
        )
        self._finalizer = weakref.finalize(self, _stop, self._bell, self._stopping, self._thread)
        self._thread.start()
        parts = {role: part.name for role, part in self.plan.parts.items()}
        seconds = time.monotonic() - self._begin
        self._observers.notify(
            "pegboard_engine_ready", EngineReady(parts=parts, load_seconds=seconds, unused_tensors=self.unused_tensors)
        )

    @classmethod
    def from_config(
        cls, source: EngineConfig | Mapping[str, Any] | str | Path, *, plugins: Sequence[object] = (), **settings: Any
    ) -> Self:
        """An engine from a TOML, YAML or JSON file, a mapping or a config; `settings` override."""
        return cls(config=source, plugins=plugins, **settings)

    def _discover(self, plugins: Sequence[object]) -> Registry:
        """What the parts are chosen from. An engine for tests sees less (`pegboard.testing.engines`)."""
        return Registry.discover(plugins)

    # -- asking

    def submit(
        self,
        prompt: Prompt | Request,
        sampling: SamplingParams | None = None,
        *,
        id: str | None = None,
        **options: Any,
    ) -> Handle:
        """Admit one request and return at once. `options` are fields of Request (priority, timeout, salt, special).

        InvalidRequest: it can never be served. QueueFull: not now. EngineDead: the engine was closed or has died.
        """
        check_options(options)
        if sampling is not None:
            options["sampling"] = sampling
        request = replace(prompt, **options) if isinstance(prompt, Request) else Request(prompt=prompt, **options)
        if id is not None and not isinstance(id, str):
            raise InvalidRequest(f"the request's id is {id!r}, must be a string or None")
        self._check_alive()
        serial, arrival = next(self._serials), time.monotonic()
        sequences = self._admission.sequences(request, serial, arrival)
        name = f"request-{serial}" if id is None else id
        indices = {spec.id: index for index, spec in enumerate(sequences)}
        make: Callable[..., Handle] = Handle
        if request.sampling.best_of is not None:
            make = partial(BestOf, request.sampling)
        handle = make(self, name, sequences[0].prompt, indices, self.config.stream_buffer)
        emissions = {
            spec.id: self._emission(indices[spec.id], request, len(spec.prompt), arrival) for spec in sequences
        }
        with self._phases.lock:
            self._check_alive()
            if name in self._handles:
                if id is not None:
                    raise InvalidRequest(f"request id {name!r} is live already: give another, or none")
                handle.id = name = f"{name}-{secrets.token_hex(4)}"  # somebody else's choice of an id
            self._phases.scheduler.add(sequences)
            self._phases.live.update(indices)
            self._handles[name] = handle
            for sequence, emission in emissions.items():
                self._by_sequence[sequence] = handle
                self._emitter.add(sequence, emission)
            self._admitted.append(RequestAdmitted(id=name, prompt_tokens=len(handle.prompt_token_ids)))
        self._bell.put(None)
        return handle

    def stream(self, prompt: Prompt | Request, sampling: SamplingParams | None = None, **options: Any) -> Stream:
        """Deltas as they come. Leaving the loop early, or dropping the stream, aborts the request."""
        return Stream(self.submit(prompt, sampling, **options))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Stream:
        """Like `stream`, for a conversation; see `chat`."""
        return self.stream(self.chat_request(messages, template=template), sampling, **options)

    @overload
    def generate(
        self, prompt: str | Request, sampling: SamplingParams | None = ..., *, progress: bool = ..., **options: Any
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt | Request],
        sampling: SamplingParams | None = ...,
        *,
        progress: bool = ...,
        **options: Any,
    ) -> list[RequestOutput]: ...
    def generate(
        self,
        prompt: str | Request | Sequence[Prompt | Request],
        sampling: SamplingParams | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """One text or Request in, one output out; a list in, a list out (a prompt of token ids goes into a list, too).

        A single prompt that can't be admitted raises; in a list its output carries the error and the others run.
        Many prompts throttle themselves against the bounded queue. `progress` shows a bar on stderr.
        """
        if isinstance(prompt, str | bytes | Request) or not isinstance(prompt, Sequence):
            return _result(self.submit(prompt, sampling, **options))  # `submit` says what is wrong with other kinds
        from .many import generate_many

        return generate_many(self, prompt, sampling, progress=progress, **options)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer a conversation with the model's own chat template. `template`: variables that it has, such as `tools`
        or `enable_thinking`; `add_generation_prompt` is True unless it says otherwise."""
        return _result(self.submit(self.chat_request(messages, template=template), sampling, **options))

    def render(self, messages: Sequence[Message], *, template: Mapping[str, Any] | None = None) -> str:
        """The text that the model's chat template makes of a conversation, for looking at it."""
        return render_prompt(self._admission.tokenizer, messages, template)

    def chat_request(
        self, messages: Sequence[Message], *, template: Mapping[str, Any] | None = None, **options: Any
    ) -> Request:
        """The request that asks for an answer to a conversation; `options` are fields of Request.

        Special tokens are the template's alone: their names inside a message stay text."""
        return Request(prompt=encode_chat(self._admission.tokenizer, messages, template), **options)

    def check(self, sampling: SamplingParams) -> None:
        """InvalidRequest naming every parameter that no request to this model may have."""
        check_request(Request(prompt="", sampling=sampling))
        self._admission.check(sampling)

    def abort(self, id: str) -> bool:
        """End a request; its deltas end with "abort". False if no such request is live."""
        self._check_process()
        with self._phases.lock:
            handle, scheduler = self._handles.get(id), self._phases.scheduler
            found = [] if handle is None else [scheduler.finish(seq, "abort") for seq in handle.indices]
        self._bell.put(None)
        return any(found)

    # -- the step

    def step(self) -> bool:
        """The corridor: plan, launch, retire, commit, emit. False when there was nothing to do.

        Called by the engine's own thread. What a part raises fails the requests that it touched (`Phases`).
        """
        if threading.current_thread() is not self._thread:
            raise PegboardError("the step belongs to the engine's own thread: submit requests instead")
        watch = Stopwatch()
        self._announce()
        while self._dropped:
            self.abort(self._dropped.popleft())
        plan = self._phases.schedule()
        self._emitter.started(plan)
        watch.lap("schedule")
        self._phases.launch(plan)
        watch.lap("launch")
        retired = self._phases.retire(plan)
        if retired is not None and retired.drafts is not None and self._speculation is not None:
            self._speculation = add_drafts(self._speculation, retired.drafts)
        watch.lap("retire")
        outcome = self._phases.commit(retired)
        watch.lap("commit")
        self._deliver(outcome)
        watch.lap("emit")
        self._observe(retired, watch)
        return plan is not None or retired is not None or bool(outcome)

    def _check_waiting(self) -> None:
        """PegboardError: the step's thread would wait for itself."""
        if threading.current_thread() is self._thread:
            raise PegboardError(
                "an observer or listener can't wait for a request: the engine's own thread would wait for itself; "
                "submit it, and take its result in another thread"
            )

    def _drop(self, id: str) -> None:
        """End a request nobody listens to. Takes no lock: a destructor may run anywhere, in the step's thread too."""
        self._dropped.append(id)
        self._bell.put(None)

    def _announce(self) -> None:
        while self._admitted:
            self._observers.notify("pegboard_request_admitted", self._admitted.popleft())

    def _deliver(self, outcome: Sequence[Progress]) -> None:
        self._announce()  # of requests that came during the step
        for progress in outcome:
            handle = self._by_sequence.get(progress.id)
            if handle is None:
                continue
            try:
                delta = self._emitter.emit(progress, not handle.gathering)
            except Exception as error:  # a tokenizer that raises is this request's trouble only
                logger.error("emitting text of %s failed", progress.id, exc_info=error)
                delta = self._emitter.fail(progress, error)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                del self._by_sequence[progress.id]
                if not any(sequence in self._by_sequence for sequence in handle.indices):
                    with self._phases.lock:
                        self._handles.pop(handle.id, None)  # its id is free before anybody can know of its end
            if not handle.put(delta):
                self._pause(handle)
            self._tell_finished(handle, delta)

    def _tell_finished(self, handle: Handle, delta: Delta) -> None:
        if delta.finish_reason is not None and delta.metrics is not None:
            event = RequestFinished(
                id=handle.id,
                index=delta.index,
                finish_reason=delta.finish_reason,
                metrics=delta.metrics,
                error=delta.error,
            )
            self._observers.notify("pegboard_request_finished", event)

    def _observe(self, retired: StepResult | None, watch: Stopwatch) -> None:
        if retired is not None and self._observers.active:
            stats = self._phases.stats()
            event = StepDone(
                step=retired.step,
                rows=len(retired.rows),
                seconds=watch.total,
                waiting=stats.waiting,
                running=stats.running,
                times=watch.times(retired.host_seconds),
                shadow=retired.shadow,
                drafts=retired.drafts,
            )
            self._observers.notify("pegboard_step_done", event)

    # -- life

    def close(self) -> None:
        """End every request with an error, stop the thread, give all memory back. Legal from anywhere, and again."""
        if os.getpid() != self._pid:
            return  # the parent's, and its lock may be taken here for ever
        with self._phases.lock:
            self._dead = self._dead or EngineDead("the engine was closed")
        if threading.current_thread() is self._thread:  # an observer asks: the thread does it when the step is over
            self._stopping.set()
            return
        self._finalizer()
        self._thread.join()  # somebody else's close may have begun before
        self._shut()

    def _shut(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._die(self._dead or EngineDead("the engine was closed"))
                self._phases.executor.close()
                self._observers.notify("pegboard_engine_closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Names of tensors in the checkpoint that the model has no use for; a warning was logged, too."""
        return self._phases.executor.unused_tensors

    def stats(self) -> EngineStats:
        """Sequences waiting, running, preempted and paused, and what shadow mode and speculation found."""
        found = () if self._shadow is None else self._shadow.stats()
        return EngineStats(**asdict(self._phases.stats()), shadow=found, speculation=self._speculation)

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be texts; token ids always may."""
        return self._admission.tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's own: `encode` and `decode`. None: prompts are token ids."""
        return self._admission.tokenizer

    def _turn(self) -> float | None:
        """One turn of the engine's thread: seconds to sleep before the next (None: until something is asked)."""
        try:
            worked = self.step()
            if self._stopping.is_set():
                self._shut()
                return None
            if worked:
                return 0.0
            if self._phases.idle:
                return None
            # Everything live is paused: only a deadline can change that by itself.
            deadline = self._phases.next_deadline()
            return None if deadline is None else max(deadline - time.monotonic(), 0.001)
        except BaseException as error:  # SystemExit from a plugin must not leave everybody waiting
            logger.critical("the engine stops after an error that it can't contain", exc_info=error)
            dead = error if isinstance(error, EngineDead) else EngineDead(f"the engine died: {error!r}")
            self._die(dead)
            return None

    def _die(self, error: EngineDead) -> None:
        """Once the step's thread is here, or gone: end everything that is live."""
        with self._phases.lock:
            self._dead = self._dead or error
        self._stopping.set()
        self._announce()
        self._deliver([Progress(id=id, finish_reason="error", error=str(error)) for id in list(self._by_sequence)])
        self._phases.abandon(str(error))

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(str(self._dead)) from self._dead
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineDead("this process was forked from the engine's: make an engine here, or use the spawn method")

    def _pause(self, handle: Handle) -> None:
        with self._phases.lock:
            if handle.paused:  # not drained in between
                for sequence in handle.indices:
                    self._phases.scheduler.pause(sequence)

    def _wake(self, handle: Handle) -> None:
        """A paused handle has room again."""
        with self._phases.lock:
            for sequence in handle.indices:
                self._phases.scheduler.resume(sequence)
        self._bell.put(None)

    def _emission(self, index: int, request: Request, prompt_tokens: int, arrival: float) -> Emission:
        tokenizer, sampling = self._admission.tokenizer, request.sampling
        return Emission(
            index,
            sampling,
            prompt_tokens,
            arrival,
            None if tokenizer is None else IncrementalDetokenizer(tokenizer),
            StopMatcher(sampling.stop, sampling.include_stop) if sampling.stop else None,
        )


def _result(handle: Handle) -> RequestOutput:
    """The result; who stops waiting (Ctrl-C) wants no more of it."""
    try:
        return handle.result()
    except BaseException:
        handle.abort()
        raise


def _work(engine: weakref.ref[Engine], bell: SimpleQueue[None], stopping: threading.Event) -> None:
    """The engine's thread. It holds no reference while it sleeps, so that a forgotten engine can go."""
    while not stopping.is_set():
        while not bell.empty():
            bell.get_nowait()
        alive = engine()
        if alive is None:
            return
        pause = alive._turn()
        del alive
        if pause != 0.0:
            with contextlib.suppress(Empty):
                bell.get(timeout=None if pause is None else min(pause, _LONGEST_SLEEP))


def _stop(bell: SimpleQueue[None], stopping: threading.Event, thread: threading.Thread) -> None:
    stopping.set()
    bell.put(None)
    if thread is not threading.current_thread():
        thread.join()
