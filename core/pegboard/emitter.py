"""From a step's outcome to deltas: text, stop strings, metrics. Owns the text state of every live sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from .contracts.observer import RequestMetrics
from .contracts.sampler import SamplingParams, TokenLogprobs
from .contracts.scheduler import FinishReason, Progress, StepPlan
from .request import Delta

if TYPE_CHECKING:
    from .text import IncrementalDetokenizer, StopMatcher


class Emission:
    """One sequence's way to text. Times on the engine's clock."""

    def __init__(
        self,
        index: int,
        sampling: SamplingParams,
        prompt_tokens: int,
        submitted: float,
        detokenizer: IncrementalDetokenizer | None,
        matcher: StopMatcher | None,
    ) -> None:
        self.index = index
        self.sampling = sampling
        self.prompt_tokens = prompt_tokens
        self.submitted = submitted
        self.detokenizer = detokenizer
        self.matcher = matcher
        self.output_tokens = 0
        #: What nobody waits for, to be made text at once later.
        self.held: list[Progress] = []
        #: Why no text can be made any more.
        self.failure: str | None = None
        self.first_row: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    def note(self, now: float) -> None:
        """Tokens have come."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    def accept(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """Text to stream, how many of the tokens belong to the output, and whether a stop string ended it."""
        if self.matcher is None:
            self.output_tokens += len(tokens)
            return self.detokenizer.push(tokens) if self.detokenizer is not None else "", len(tokens), False
        pieces: list[str] = []
        for taken, token in enumerate(tokens, start=1):
            self.output_tokens += 1
            text = self.detokenizer.push((token,)) if self.detokenizer is not None else ""
            released, stopped = self.matcher.push(text, self.output_tokens >= self.sampling.min_tokens)
            pieces.append(released)
            if stopped:
                return "".join(pieces), taken, True
        return "".join(pieces), len(tokens), False

    def rest(self) -> tuple[str, bool]:
        """Text held back until the end, and whether it completes a stop string."""
        text = self.detokenizer.finish() if self.detokenizer is not None else ""
        if self.matcher is None:
            return text, False
        released, stopped = self.matcher.push(text, self.output_tokens >= self.sampling.min_tokens)
        if not stopped:  # a match may have waited for a longer one that began further left
            released += self.matcher.finish()
        return released, self.matcher.matched is not None

    def metrics(self, now: float, progress: Progress) -> RequestMetrics:
        itl = None
        if self.output_tokens > 1 and self.first_token is not None and self.last_token is not None:
            itl = (self.last_token - self.first_token) / (self.output_tokens - 1)
        return RequestMetrics(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=progress.cached_tokens,
            output_tokens=self.output_tokens,
            queue_time=None if self.first_row is None else self.first_row - self.submitted,
            ttft=None if self.first_token is None else self.first_token - self.submitted,
            itl=itl,
            total_time=now - self.submitted,
            preemptions=progress.preemptions,
        )


class Emitter:
    """`finish(id)` is called when a stop string ends a sequence that the scheduler still runs; the sequence's own
    terminal Progress is then the end that is delivered."""

    def __init__(self, clock: Callable[[], float], finish: Callable[[str, FinishReason, str | None], object]) -> None:
        self._clock = clock
        self._finish = finish
        self._live: dict[str, Emission] = {}
        #: Sequences that a stop string ended: later tokens of theirs are void.
        self._stopped: set[str] = set()

    def add(self, id: str, emission: Emission) -> None:
        self._live[id] = emission

    def forget(self, id: str) -> None:
        self._live.pop(id, None)
        self._stopped.discard(id)

    def started(self, plan: StepPlan | None) -> None:
        """Note the time for sequences that get their first row in this step."""
        for row in () if plan is None else plan.rows:
            emission = self._live.get(row.id) if row.opening is not None else None
            if emission is not None and emission.first_row is None:
                emission.first_row = self._clock()

    def emit(self, progress: Progress, wanted: bool = True) -> Delta | None:
        """What to deliver for one sequence, or None. An exception here is the sequence's own failure.

        `wanted`: somebody waits for it. Else it may be delivered with what comes later."""
        emission = self._live.get(progress.id)
        if emission is None:
            return None
        if emission.failure is not None:
            return self.fail(progress, RuntimeError(emission.failure)) if progress.finish_reason is not None else None
        now = self._clock()
        if progress.tokens:
            emission.note(now)
        if not wanted and progress.finish_reason is None and emission.matcher is None:
            emission.held.append(progress)
            return None
        if emission.held:
            progress = _joined(emission.held, progress)
            emission.held = []
        text, taken, stopped = "", 0, progress.id in self._stopped
        logprobs: tuple[TokenLogprobs, ...] = ()
        if not stopped:
            text, taken, stopped = emission.accept(progress.tokens)
            logprobs = progress.logprobs[:taken]
            if stopped and progress.finish_reason is None:
                self._stopped.add(progress.id)
                self._finish(progress.id, "stop", None)
        reason, metrics = progress.finish_reason, None
        if reason is not None:
            if progress.id not in self._stopped and not stopped:
                rest, ended = emission.rest()
                text += rest
                stopped = ended
            metrics = emission.metrics(now, progress)
            self.forget(progress.id)
        if not (text or taken or progress.prompt_logprobs or reason):
            return None
        if reason is None and not (logprobs or progress.prompt_logprobs):
            return Delta(index=emission.index, text=text, token_ids=progress.tokens[:taken])
        return Delta(
            index=emission.index,
            text=text,
            token_ids=progress.tokens[:taken],
            logprobs=logprobs,
            prompt_logprobs=progress.prompt_logprobs,
            # Whatever happened after a stop string was found does not matter any more.
            finish_reason="stop" if reason is not None and stopped else reason,
            error=None if stopped else progress.error,
            metrics=metrics,
            score=progress.score,
        )

    def fail(self, progress: Progress, error: Exception) -> Delta | None:
        """Its text can't be made any more: end it, and say why when the scheduler has let go of it."""
        emission = self._live.get(progress.id)
        if emission is None:
            return None
        emission.failure = emission.failure or f"making text of the tokens failed: {error!r}"
        if progress.finish_reason is None:
            self._finish(progress.id, "error", emission.failure)
            return None
        self.forget(progress.id)
        metrics = emission.metrics(self._clock(), progress)
        return Delta(index=emission.index, finish_reason="error", error=emission.failure, metrics=metrics)


def _joined(held: Sequence[Progress], last: Progress) -> Progress:
    """The last one with everything that came before."""
    every = (*held, last)
    return replace(
        last,
        tokens=tuple(token for progress in every for token in progress.tokens),
        logprobs=tuple(record for progress in every for record in progress.logprobs),
        prompt_logprobs=tuple(record for progress in every for record in progress.prompt_logprobs),
    )
