"""Deltas on their way from the step's thread to whoever asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from .contracts.observer import RequestMetrics
from .request import Completion, Delta, RequestOutput

if TYPE_CHECKING:
    from .engine import Engine


logger = logging.getLogger("pegboard")


class Handle:
    """One submitted request: iterate over its deltas, or take its `result`. Safe from any thread.

    The step's thread puts, one consumer takes. When more than `bound` deltas wait, the request is paused until the
    consumer has taken half of them; other requests go on. `result` has everything, taken before or not; after it is
    called nothing waits, so it never pauses.
    """

    def __init__(self, engine: Engine, id: str, prompt: tuple[int, ...], indices: dict[str, int], bound: int) -> None:
        self.id = id
        self.prompt_token_ids = prompt
        #: Sequence id -> index of the continuation.
        self.indices = indices
        self._engine = engine
        self._bound = bound
        #: The condition's lock, which is taken for each token.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._open = set(indices.values())
        self._paused = False
        #: Only the `result` is wanted.
        self.gathering = False
        #: Every delta so far, and how many of them the consumer has taken.
        self._record: list[Delta] = []
        self._taken = 0
        #: Threads that wait for something new.
        self._asleep = 0
        self._listener: Callable[[], None] | None = None

    # -- the consumer's side

    def __iter__(self) -> Iterator[Delta]:
        """Every delta from here on; ends after the last index's terminal one."""
        while (delta := self.take()) is not None:
            yield delta

    def take(self, timeout: float | None = None) -> Delta | None:
        """The next delta, waiting for it; None when all were taken. TimeoutError after `timeout` seconds."""
        self._engine._check_process()
        with self._ready:
            if not self._wait_for(lambda: self._waiting > 0 or not self._open, timeout):
                raise TimeoutError(f"request {self.id}: nothing new within {timeout} s")
            return self._pop()

    def take_now(self) -> Delta | None:
        """The next delta if one waits, else None."""
        with self._ready:
            return self._pop()

    @property
    def live(self) -> bool:
        """Some continuation has not ended yet."""
        return bool(self._open)

    @property
    def paused(self) -> bool:
        """Its consumer is behind."""
        return self._paused

    @property
    def done(self) -> bool:
        """All deltas were taken, the terminal ones included."""
        with self._ready:
            return not self._open and not self._waiting

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and put everything together. TimeoutError after `timeout` seconds; the request goes on."""
        self._engine._check_process()
        self.gather()
        with self._ready:
            if not self._wait_for(lambda: not self._open, timeout):
                raise TimeoutError(f"request {self.id}: not finished within {timeout} s")
            return _join(self.id, self.prompt_token_ids, self._record)

    def gather(self) -> None:
        """Only the `result` is wanted: nothing waits for a consumer any more, so nothing pauses."""
        with self._ready:
            self.gathering = True
            self._taken = len(self._record)
            self._release()

    def abort(self) -> None:
        """End it; its deltas end with finish_reason "abort". Nothing happens if it has ended already."""
        self._engine.abort(self.id)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` (from the step's thread) whenever something new waits."""
        with self._ready:
            self._listener = listener
        listener()

    @property
    def _waiting(self) -> int:
        """Deltas that the consumer has not taken."""
        return 0 if self.gathering else len(self._record) - self._taken

    def _wait_for(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """With the lock held."""
        if not ready():
            self._engine._check_waiting()
            self._asleep += 1
            try:
                return self._ready.wait_for(ready, timeout)
            finally:
                self._asleep -= 1
        return True

    def _pop(self) -> Delta | None:
        delta = None
        if self._waiting:
            delta = self._record[self._taken]
            self._taken += 1
        if self._paused and self._waiting <= self._bound // 2:
            self._release()
        return delta

    def _release(self) -> None:
        if self._paused:
            self._paused = False
            self._engine._wake(self)  # the engine's own other half

    # -- the step's side

    def put(self, delta: Delta) -> bool:
        """False: the consumer is behind, pause the request."""
        with self._lock:
            if delta.index not in self._open:
                return True
            self._record.append(delta)
            if delta.finish_reason is not None:
                self._open.discard(delta.index)
            if not self._paused and self._waiting > self._bound and self._open:
                self._paused = True
            paused, listener = self._paused, self._listener
            # Each waking costs the step's thread a turn
            if self._asleep and (not self.gathering or delta.finish_reason is not None):
                self._ready.notify_all()
        if listener is not None:
            try:
                listener()
            except Exception:
                logger.exception("a listener of request %s raised and is dropped", self.id)
                self._listener = None
        return not paused


class Stream(Iterator[Delta]):
    """The deltas of a request that ends with its consumer: closing or dropping the stream aborts it."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __next__(self) -> Delta:
        delta = self.handle.take()
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        self.handle.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.handle.live:
            self.handle._engine._drop(self.handle.id)


def _join(id: str, prompt: tuple[int, ...], deltas: list[Delta]) -> RequestOutput:
    completions = []
    for index in sorted({delta.index for delta in deltas}):
        own = [delta for delta in deltas if delta.index == index]
        last = own[-1]
        assert last.finish_reason is not None  # the last delta of an index is its terminal one
        logprobs = tuple(record for delta in own for record in delta.logprobs)
        completions.append(
            Completion(
                index=index,
                text="".join(delta.text for delta in own),
                token_ids=tuple(token for delta in own for token in delta.token_ids),
                finish_reason=last.finish_reason,
                metrics=last.metrics or RequestMetrics(),
                logprobs=logprobs or None,
                error=last.error,
                score=last.score,
            )
        )
    scored = tuple(record for delta in deltas for record in delta.prompt_logprobs if delta.index == 0)
    errors = [c.error for c in completions if c.error is not None]
    return RequestOutput(
        id=id,
        prompt_token_ids=prompt,
        completions=tuple(completions),
        prompt_logprobs=scored or None,
        error=errors[0] if errors else None,
    )
