"""A scheduler whose sequences may be beam searches: to the engine one result each, to the scheduler inside beams."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from msgspec.structs import replace

from pegboard.contracts.sampler import SamplingParams, TokenLogprobs
from pegboard.contracts.scheduler import (
    FinishReason,
    Progress,
    Scheduler,
    SchedulerStats,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from pegboard.errors import QueueFull

from .search import BeamSearch, Step, count_listed

logger = logging.getLogger("pegboard")


class _Live:
    """One search that has not told all of its results."""

    def __init__(self, leader: SequenceSpec) -> None:
        sampling = leader.sampling
        self.search = BeamSearch(sampling, leader.stop_ids, leader.max_length - len(leader.prompt))
        #: What the beams are to the scheduler inside; the first is called as the leader is.
        self.spec = replace(
            leader,
            sampling=SamplingParams(
                temperature=0.0,
                logprobs=count_listed(sampling, leader.stop_ids),
                prompt_logprobs=sampling.prompt_logprobs,
            ),
            stop_ids=frozenset(),
            needs_host_token=True,
            host_chooses=True,
        )
        self.leader = leader
        #: Results that are not told yet: id -> rank.
        self.open: dict[str, int] = {leader.id: 0}
        #: Sequences that the scheduler inside holds for it, and of them the beams, best first.
        self.held: set[str] = {leader.id}
        self.beams: list[str] = [leader.id]
        #: What the beams' rows listed.
        self.rows: dict[str, TokenLogprobs] = {}
        #: Calls that the chosen beams still need, in order.
        self.calls: deque[Callable[[], object]] = deque()
        self.paused = False
        self.made = 0
        #: Why its results end, once it is known.
        self.over = False
        self.reason: FinishReason | None = None
        self.error: str | None = None
        self.cached_tokens = 0
        self.preemptions = 0

    def end(self, reason: FinishReason | None = None, error: str | None = None) -> None:
        """Without a reason: as its texts did."""
        if not self.over:
            self.over, self.reason, self.error = True, reason, error
            self.calls.clear()

    def results(self) -> list[Progress]:
        return [self._result(id, rank) for id, rank in self.open.items()]

    def _result(self, id: str, rank: int) -> Progress:
        found = self.search.texts[rank] if self.reason is None and rank < len(self.search.texts) else None
        if found is None:
            return Progress(
                id=id,
                finish_reason=self.reason or "error",
                error=self.error if self.reason else "beam search found no further text: every token is masked",
                cached_tokens=self.cached_tokens,
                preemptions=self.preemptions,
            )
        path = found.last.path()
        return Progress(
            id=id,
            tokens=tuple(record.token_id for record in path),
            logprobs=() if self.leader.sampling.logprobs is None else path,
            finish_reason="stop" if found.stopped else "length",
            score=found.score,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
        )


class BeamScheduler(Scheduler):
    """Around any scheduler with `host_chooses`. Beams are sequences of that scheduler, called "<leader>+1", ..."""

    host_chooses = True

    def __init__(self, inner: Scheduler) -> None:
        #: The scheduler that plans the steps.
        self.inner = inner
        #: By result, and by beam.
        self._results: dict[str, _Live] = {}
        self._beams: dict[str, _Live] = {}
        self._told: list[Progress] = []

    @classmethod
    def refusals(cls, need: Any, options: Any) -> Sequence[str]:
        return ["is made around another scheduler only"]

    @classmethod
    def create(cls, need: Any, options: Any, **parts: Any) -> NoReturn:
        raise NotImplementedError("made around another scheduler only")

    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        if all(spec.sampling.num_beams == 1 for spec in sequences):
            self.inner.add(sequences)
            return
        made: dict[str, _Live] = {}
        inside: list[SequenceSpec] = []
        for spec in sequences:
            if spec.id in self._results:
                raise ValueError(f"sequence {spec.id!r} is live already")
            if spec.sampling.num_beams == 1:
                inside.append(spec)
            elif spec.parent is None:
                made[spec.id] = _Live(spec)
                inside.append(made[spec.id].spec)
            else:
                live = made[spec.parent]
                live.open[spec.id] = len(live.open)
        self.inner.add(inside)
        for id, live in made.items():
            self._beams[id] = live
            self._results.update(dict.fromkeys(live.open, live))

    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        live = self._results.pop(id, None)
        if live is None:
            return id not in self._beams and self.inner.finish(id, reason, error)
        del live.open[id]
        self._told.append(Progress(id=id, finish_reason=reason, error=error))
        if not live.open:
            live.end(reason)
            self._drop(live)
        return True

    def pause(self, id: str) -> bool:
        live = self._results.get(id)
        if live is None:
            return id not in self._beams and self.inner.pause(id)
        live.paused = True
        for beam in live.beams:
            self.inner.pause(beam)
        return True

    def resume(self, id: str) -> bool:
        live = self._results.get(id)
        if live is None:
            return id not in self._beams and self.inner.resume(id)
        live.paused = False
        for beam in live.beams:
            if beam not in live.rows:  # those rest until they are chosen
                self.inner.resume(beam)
        return True

    def fork(self, parent: str, child: SequenceSpec, tokens: Sequence[int] = ()) -> None:
        self._refuse(parent)
        self.inner.fork(parent, child, tokens)

    def extend(self, id: str, tokens: Sequence[int]) -> None:
        self._refuse(id)
        self.inner.extend(id, tokens)

    def _refuse(self, id: str) -> None:
        if id in self._results or id in self._beams:
            raise ValueError(f"sequence {id!r} is a beam search, which chooses its own tokens")

    def schedule(self) -> StepPlan | None:
        return self.inner.schedule()

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        if not self._beams and not self._told:
            return self.inner.commit(result)
        out: list[Progress] = []
        try:
            self._commit(result, out)
        except Exception as error:
            self._give_up(f"committing a step failed: {error!r}", out)
            raise
        out += self._told
        self._told.clear()
        return tuple(out)

    def _commit(self, result: StepResult | None, out: list[Progress]) -> None:
        told = self.inner.commit(result)
        while True:
            for progress in told:
                live = self._beams.get(progress.id)
                if live is None:
                    out.append(progress)
                else:
                    self._take(live, progress, out)
            if not self._advance(out):
                return
            told = self.inner.commit(None)  # what became final by the calls

    def _give_up(self, error: str, out: list[Progress]) -> None:
        """What the scheduler inside had to say is lost: no search can go on. What is out already is told later."""
        self._told += out
        for id in self._results:
            self._told.append(Progress(id=id, finish_reason="error", error=error))
        beams = list(self._beams)
        self._results.clear()
        self._beams.clear()
        for beam in beams:
            self.inner.finish(beam, "error", error)

    def _take(self, live: _Live, progress: Progress, out: list[Progress]) -> None:
        if progress.prompt_logprobs and live.leader.id in live.open:
            out.append(Progress(id=live.leader.id, prompt_logprobs=progress.prompt_logprobs))
        if progress.finish_reason is not None:
            del self._beams[progress.id]
            live.held.discard(progress.id)
            live.cached_tokens += progress.cached_tokens if progress.id == live.leader.id else 0
            live.preemptions += progress.preemptions
            if progress.id in live.beams:
                live.end(progress.finish_reason, progress.error)
        elif progress.logprobs and progress.id in live.beams:
            live.rows[progress.id] = progress.logprobs[-1]
            self.inner.pause(progress.id)  # it rests: whoever starves may have its pages and its slot

    def _advance(self, out: list[Progress]) -> bool:
        """Whether anything was asked of the scheduler inside."""
        asked = False
        for live in dict.fromkeys(self._beams.values()):
            if not live.over and not live.calls and all(beam in live.rows for beam in live.beams):
                self._choose(live)
            if live.over:
                asked = self._drop(live) or asked
            while live.calls:
                try:
                    live.calls[0]()
                except QueueFull:
                    break  # there is room after another step
                except Exception as error:
                    self._fail(live, error)
                    asked = self._drop(live) or asked
                    break
                live.calls.popleft()
                asked = True
        for live in dict.fromkeys(self._results.values()):
            if live.over and not live.held:
                out += live.results()
                for id in live.open:
                    del self._results[id]
                live.open.clear()
        return asked

    def _choose(self, live: _Live) -> None:
        try:
            step = live.search.advance([live.rows[beam] for beam in live.beams])
        except Exception as error:
            self._fail(live, error)
            return
        if step is None:
            live.end()
        else:
            self._plan(live, step)

    @staticmethod
    def _fail(live: _Live, error: Exception) -> None:
        logger.error("beam search of %s failed", live.leader.id, exc_info=error)
        live.end("error", f"beam search failed: {error!r}")

    def _plan(self, live: _Live, step: Step) -> None:
        """The calls from these beams to the next: those that nothing follows end first, since their slots are needed;
        a beam's first continuation takes its place, after others have forked from it."""
        parents, beams, extended = live.beams, [], {}
        for place, token in step.beams:
            parent = parents[place]
            if parent not in extended:
                extended[parent] = token
                beams.append(parent)
                continue
            live.made += 1
            child = f"{live.leader.id}+{live.made}"
            live.calls.append(partial(self._fork, live, parent, child, token))
            beams.append(child)
        ended = [parent for parent in parents if parent not in extended]
        live.calls.extendleft(partial(self.inner.finish, parent, "abort") for parent in ended)
        live.calls.extend(partial(self._extend, live, parent, token) for parent, token in extended.items())
        live.beams = beams
        live.rows.clear()

    def _fork(self, live: _Live, parent: str, child: str, token: int) -> None:
        self.inner.fork(parent, replace(live.spec, id=child), (token,))
        self._beams[child] = live
        live.held.add(child)
        if live.paused:
            self.inner.pause(child)

    def _extend(self, live: _Live, id: str, token: int) -> None:
        self.inner.extend(id, (token,))
        if not live.paused:
            self.inner.resume(id)

    def _drop(self, live: _Live) -> bool:
        """Its beams are not needed any more."""
        live.beams = []
        return sum(self.inner.finish(beam, "abort") for beam in live.held) > 0

    def fail(self, step: int, error: str) -> None:
        self.inner.fail(step, error)

    def is_live(self, id: str) -> bool:
        return id in self._results or (id not in self._beams and self.inner.is_live(id))

    def has_work(self) -> bool:
        return bool(self._told) or self.inner.has_work()

    def next_deadline(self) -> float | None:
        return self.inner.next_deadline()

    def stats(self) -> SchedulerStats:
        return self.inner.stats()

    def check_integrity(self) -> None:
        self.inner.check_integrity()
        for id, live in self._beams.items():
            if id not in live.held:
                raise AssertionError(f"{id!r} is a beam of {live.leader.id!r}, which does not hold it")
        for id, live in self._results.items():
            if id not in live.open or not live.held:
                raise AssertionError(f"{id!r} waits for {live.leader.id!r}, which has {len(live.held)} beams")
