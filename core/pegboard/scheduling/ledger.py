"""The books of a scheduler: sequences, slots, pages, steps in flight, and what became final.

Policies read `running` and `next_waiting`, and call `begin`, `admit`, `preempt` and `launch`; everything else that the
scheduler contract asks for is done here once, for every policy.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids

from pegboard.contracts.cache import CacheManager
from pegboard.contracts.sampler import TokenLogprobs
from pegboard.contracts.scheduler import (
    FinishReason,
    Progress,
    RowPlan,
    RowResult,
    SchedulerNeed,
    SchedulerStats,
    SequenceSpec,
    SlotPages,
    StepPlan,
    StepResult,
)
from pegboard.errors import InvalidRequest, QueueFull

from .line import Line
from .sequence import Sequence
from .step import StepBuilder


def by_priority(spec: SequenceSpec) -> float:
    return -spec.priority


class Ledger:
    """Owns the state of every live sequence; the cache manager is called by nobody else.

    Entries and positions coincide. Epochs are unique over the ledger's life, so a result of an older life of an id, or
    from before a preemption, is never taken for a newer one.
    """

    def __init__(
        self,
        need: SchedulerNeed,
        cache: CacheManager,
        clock: Callable[[], float],
        rank: Callable[[SequenceSpec], float] = by_priority,
    ) -> None:
        """`rank`: lower runs earlier and is preempted later; ties go by arrival, then by order of admission."""
        self.need = need
        self.cache = cache
        #: Sequences with a slot and pages, best rank first.
        self.running = Line()
        self._clock = clock
        self._rank = rank
        self._stride = cache.commit_stride
        self._live: dict[str, Sequence] = {}
        self._waiting = Line()
        self._preempted = Line()
        self._slots = list(range(need.max_rows - 1, -1, -1))
        #: Steps that fly, oldest first, and their rows.
        self._flights: deque[tuple[int, tuple[RowPlan, ...]]] = deque()
        #: Sequences whose tables each step in flight brings up to date, with a row in it or not.
        self._named: dict[int, set[str]] = {}
        self._steps = 0
        self._order = 0
        self._epochs = 0
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._progress: list[Progress] = []
        #: Children whose parent's prompt was launched by the last step.
        self._hatched: list[Sequence] = []
        #: The sequence that did not fit, and the pages that were available then.
        self._blocked: tuple[Sequence, int] | None = None
        self._paused = 0
        #: Sequences that are preempted now, and preemptions since the start.
        self._lost = 0
        self._preemptions = 0

    # -- admission ---------------------------------------------------------------------------------------------------

    def add(self, specs: Ids[SequenceSpec]) -> None:
        """Admit all or none (see Scheduler.add)."""
        names: set[str] = set()
        for spec in specs:
            if spec.id in self._live or spec.id in names:
                raise ValueError(f"sequence {spec.id!r} is live already")
            names.add(spec.id)
            self._check(spec)
        limit, waiting = self.need.max_queue, self._count_waiting()
        if len(specs) > limit:
            raise InvalidRequest(f"{len(specs)} sequences at once; the queue holds {limit}: lower n or raise max_queue")
        if waiting + len(specs) > limit:
            raise QueueFull(f"{waiting} of {limit} places in the queue are taken and {len(specs)} are asked for")
        for spec in specs:
            seq = self._enter(spec)
            parent = self._live.get(spec.parent) if spec.parent is not None else None
            if parent is not None and not parent.prompt_step:
                seq.phase = "parked"
                parent.children.append(seq)
            else:
                self._waiting.insert(seq)

    def _check(self, spec: SequenceSpec) -> None:
        if not spec.prompt:
            raise InvalidRequest(f"{spec.id!r}: the prompt is empty; at least one token is needed")
        if spec.max_length <= len(spec.prompt):
            raise InvalidRequest(f"{spec.id!r}: max_length {spec.max_length} leaves no room after {len(spec.prompt)}")
        if spec.max_length > self.need.max_length:
            raise InvalidRequest(f"{spec.id!r}: {spec.max_length} tokens; the engine's limit is {self.need.max_length}")
        if not self.cache.fits(spec.max_length):
            raise InvalidRequest(f"{spec.id!r}: {spec.max_length} tokens are more than the whole KV cache holds")

    def _enter(self, spec: SequenceSpec) -> Sequence:
        self._order += 1
        seq = Sequence(spec, (self._rank(spec), spec.arrival, self._order), self._new_epoch())
        self._live[spec.id] = seq
        if spec.deadline is not None:
            if len(self._deadlines) > 2 * len(self._live) + 16:  # behind a late one, ended ones would pile up
                self._deadlines = [entry for entry in self._deadlines if entry[2].phase != "ended"]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (spec.deadline, self._order, seq))
        return seq

    def _new_epoch(self) -> int:
        self._epochs += 1
        return self._epochs

    def _count_waiting(self) -> int:
        return len(self._live) - len(self.running) - self._lost

    # -- planning ----------------------------------------------------------------------------------------------------

    def begin(self) -> StepBuilder:
        """Start a step: end what is past its deadline, let children join the line."""
        now = self._clock()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].phase == "ended"):
            seq = heapq.heappop(self._deadlines)[2]
            if seq.phase != "ended":
                self._end(seq, "deadline", "the deadline passed")
        self._unpark(self._hatched)
        self._hatched = []
        return StepBuilder(self._steps + 1, self.need, self.cache)

    def next_waiting(self, fresh: bool = True) -> Sequence | None:
        """Who is next to be admitted. A sequence that keeps a slot passes one that finds none free, since only those
        who hold slots can free them; nobody else passes the first in line. `fresh=False`: preempted ones only."""
        again = self._preempted.first
        new = self._waiting.first if fresh and self._slots else None
        if again is None or new is None:
            return again or new
        return again if again.key[0] <= new.key[0] else new

    def admit(self, seq: Sequence, limit: int, keep: int = 0) -> bool:
        """Open a sequence that `next_waiting` named, with pages for its first `limit` queries at most, if `keep` pages
        stay available after it. It runs from now on; False: it doesn't fit now and stays where it was."""
        stats = self.cache.stats()
        available = stats.free + stats.cached
        if self._blocked is not None and self._blocked[0] is seq and available <= self._blocked[1] and self.active:
            return False
        self._blocked = None
        if seq.slot < 0:
            seq.slot = self._slots.pop()
        self._open(seq)
        query = min(seq.wants(), limit)
        fits = self.cache.reserve(seq.id, seq.entries + query)
        if fits and keep:
            stats = self.cache.stats()
            fits = stats.free + stats.cached >= keep
        if not fits:
            self.cache.release(seq.id)
            self._empty(seq)
            if seq.phase == "waiting":
                self._slots.append(seq.slot)
                seq.slot = -1
            self._blocked = (seq, available)
            return False
        if seq.phase == "preempted":
            self._preempted.discard(seq)
            self._lost -= 1
        else:
            self._waiting.discard(seq)
        seq.phase = "running"
        self.running.insert(seq)
        if seq.cached < 0:
            seq.cached = min(seq.entries, seq.prompt_length)
        return True

    @property
    def active(self) -> bool:
        """Whether a sequence that is not paused runs."""
        return any(not seq.paused for seq in self.running.backwards())

    def _open(self, seq: Sequence) -> None:
        parent = self._live.get(seq.spec.parent) if seq.spec.parent is not None else None
        if parent is not None and seq.cached < 0 and not seq.output_length and self._fork_prompt(parent, seq):
            return
        reuse = seq.scored >= seq.prompt_length - 1
        seq.entries = seq.committed = self.cache.open(seq.id, seq.tokens, salt=seq.spec.salt, reuse=reuse)

    def _fork_prompt(self, parent: Sequence, seq: Sequence) -> bool:
        """Take the prompt's entries from the parent, if an earlier step has launched them all."""
        if parent.phase != "running" or not 0 < parent.prompt_step <= self._steps:
            return False
        if parent.spec.prompt != seq.spec.prompt or parent.spec.salt != seq.spec.salt:
            return False
        length = seq.prompt_length - 1
        try:
            self.cache.fork(parent.id, seq.id, length)
        except ValueError:
            # A windowed group has moved on, or a recurrent state has: the prompt is computed again.
            return False
        seq.entries = length
        seq.committed = min(parent.committed, length)
        seq.relies = (*self._steps_of(parent), *parent.relies)
        return True

    def _steps_of(self, seq: Sequence) -> tuple[int, ...]:
        return tuple(step for step, rows in self._flights if any(_is_of(row, seq) for row in rows))

    def preempt(self, seq: Sequence) -> None:
        """Take the pages of a running sequence; it starts over from all its tokens. What flies is void."""
        self.cache.release(seq.id, self._fence(seq))
        self._empty(seq)
        self.running.discard(seq)
        seq.phase = "preempted"
        seq.epoch = self._new_epoch()
        seq.opening_due = True
        seq.preemptions += 1
        self._preemptions += 1
        self._lost += 1
        if seq.paused:
            self._give_slot_back(seq)
        # Its own pages must not bring it straight back: only pages that others give up count.
        stats = self.cache.stats()
        self._blocked = (seq, stats.free + stats.cached + stats.fenced)
        if not seq.paused:
            self._preempted.insert(seq)
        self._unpark([seq])

    @property
    def starved(self) -> bool:
        """Somebody waits, and every slot is taken."""
        return bool(self._waiting) and not self._slots

    def _give_slot_back(self, seq: Sequence) -> None:
        """A preempted sequence whose consumer is behind starts over like a new one: others may need its slot."""
        seq.phase = "waiting"
        self._lost -= 1
        self._slots.append(seq.slot)
        seq.slot = -1

    @staticmethod
    def _empty(seq: Sequence) -> None:
        seq.entries = seq.committed = 0
        seq.flying = seq.flying_entries = seq.flying_samples = 0
        seq.prompt_step = 0
        seq.relies = ()
        seq.going_on = None

    def _unpark(self, parents: Iterable[Sequence]) -> None:
        for parent in parents:
            for child in parent.children:
                if child.phase == "parked":
                    child.phase = "waiting"
                    if not child.paused:
                        self._waiting.insert(child)
            parent.children.clear()

    def launch(self, step: StepBuilder) -> StepPlan | None:
        """The plan of the step, in flight from now on; None when it has no rows."""
        rows = step.rows
        if not rows:
            return None
        self._steps = step.id
        self._hatched = step.prompts_done
        self._flights.append((step.id, rows))
        changes = self.cache.take_changes()
        self._named[step.id] = {update.seq for update in changes.updates}
        live = self._live
        tables = tuple(
            SlotPages(
                slot=live[update.seq].slot,
                group=update.group,
                start=update.start,
                pages=update.pages,
                dropped=update.dropped,
            )
            for update in changes.updates
        )
        reach = step.reach or None
        return StepPlan(id=step.id, rows=rows, copies=changes.copies, moves=changes.moves, tables=tables, reach=reach)

    # -- results -----------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        if result is not None:
            if not self._flights or self._flights[0][0] != result.step:
                flying = [step for step, _ in self._flights]
                raise ValueError(f"step {result.step} can't retire now; in flight, oldest first: {flying}")
            _, rows = self._flights.popleft()
            self._named.pop(result.step, None)
            self._retire()
            live = self._live
            for id, mass in result.score_mass:
                if id in live:
                    self.cache.observe_score_mass(id, mass, self._fence(live[id]))
            for plan, row in zip(rows, _in_order(rows, result.rows), strict=True):
                seq = live.get(plan.id)
                if seq is not None and seq.epoch == plan.epoch:
                    if plan is seq.going_on and row.error is None and len(row.tokens) == 1:
                        self._take_next(seq, row)
                    else:
                        self._take(seq, plan, row)
        progress = tuple(self._progress)
        self._progress.clear()
        return progress

    def _retire(self) -> None:
        self.cache.retire(self._flights[0][0] - 1 if self._flights else self._steps)

    def _take_next(self, seq: Sequence, row: RowResult) -> None:
        """Most rows: one token was fed by the device, one was chosen. What `_take` does, in fewer turns."""
        seq.flying -= 1
        seq.flying_entries -= 1
        seq.flying_samples -= 1
        seq.entries = entries = seq.entries + 1
        known, tokens, reason = seq.tokens, row.tokens, None
        known.extend(tokens)
        if len(known) >= seq.max_length or not seq.stop_ids.isdisjoint(tokens):
            tokens, reason = self._cut(seq, tokens)
        if not entries % self._stride:
            self.cache.commit(seq.id, known[seq.committed : entries], self._fence(seq))
            seq.committed = entries
        if reason is None:
            self._progress.append(Progress(id=seq.id, tokens=tokens, logprobs=row.logprobs))
        else:
            self._end(seq, reason, None, tokens, row.logprobs)

    def _take(self, seq: Sequence, plan: RowPlan, row: RowResult) -> None:
        """Take in one row of the sequence's present life."""
        seq.flying -= 1
        seq.flying_entries -= plan.query
        tokens, reason = row.tokens, None
        if row.error is not None:
            self._end(seq, "error", row.error)
            if row.tainted:  # whatever spoilt it may lie in entries that were committed before
                self.cache.reset_prefixes()
            return
        known = seq.tokens
        if plan.samples:
            seq.flying_samples -= 1
            if not tokens:
                self._end(seq, "error", f"the row of {seq.id!r} chose no token")
                return
            if seq.host_chooses:
                tokens = ()
                seq.entries += plan.query
            else:
                seq.entries += plan.query - plan.drafts + len(tokens) - 1
            known.extend(tokens)
            if len(known) >= seq.max_length or not seq.stop_ids.isdisjoint(tokens):
                tokens, reason = self._cut(seq, tokens)
        else:
            seq.entries += plan.query
        if plan.targets:
            seq.scored = max(seq.scored, min(plan.start + plan.query, seq.prompt_length - 1))
        # The last token is known but not computed; a stop inside accepted drafts leaves entries that don't count.
        final = seq.entries
        if final >= len(known):
            final = len(known) - 1
        if final > seq.committed:
            self.cache.commit(seq.id, known[seq.committed : final], self._fence(seq))
            seq.committed = final
        if reason is not None:
            self._end(seq, reason, None, tokens, row.logprobs[: len(tokens)], row.prompt_logprobs)
        elif tokens or row.logprobs or row.prompt_logprobs:
            self._progress.append(
                Progress(id=seq.id, tokens=tokens, logprobs=row.logprobs, prompt_logprobs=row.prompt_logprobs)
            )

    @staticmethod
    def _cut(seq: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Of tokens just appended, those up to the one that ends the sequence, that one included, and why it ends."""
        start = len(seq.tokens) - len(tokens)
        least = seq.prompt_length + seq.spec.sampling.min_tokens
        for length, token in enumerate(tokens, start + 1):
            stops = token in seq.stop_ids and length > least
            if stops or length >= seq.max_length:
                del seq.tokens[length:]
                return tokens[: length - start], "stop" if stops else "length"
        return tokens, None

    def fail(self, step: int, error: str) -> None:
        """A step in flight is lost: its sequences end; forks that counted on its entries, and those whose tables it was
        to bring up to date, start over."""
        flight = next((flight for flight in self._flights if flight[0] == step), None)
        if flight is None:
            raise ValueError(f"step {step} is not in flight")
        self._flights.remove(flight)
        for plan in flight[1]:
            seq = self._live.get(plan.id)
            if seq is not None and seq.epoch == plan.epoch:
                self._end(seq, "error", error)
        # Whether the device has seen the step's copies and tables is not known, so nobody may count on them.
        named = self._named.pop(step, set())
        for seq in self.running:
            if step in seq.relies or seq.id in named:
                self.preempt(seq)
        self._retire()

    def _fence(self, seq: Sequence) -> int:
        """The last launched step with a row of it: one that is being planned may never be launched."""
        return min(seq.fence, self._steps)

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        error: str | None = None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        if seq.phase == "running":
            self.cache.release(seq.id, self._fence(seq))
        elif seq.phase == "preempted":
            self._lost -= 1
        for line in (self.running, self._waiting, self._preempted):
            line.discard(seq)
        if seq.slot >= 0:
            self._slots.append(seq.slot)
        del self._live[seq.id]
        seq.phase = "ended"
        self._paused -= seq.paused
        if self._blocked is not None and self._blocked[0] is seq:
            self._blocked = None
        self._unpark([seq])
        self._progress.append(
            Progress(
                id=seq.id,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                error=error,
                cached_tokens=max(seq.cached, 0),
                preemptions=seq.preemptions,
            )
        )

    # -- calls from outside ------------------------------------------------------------------------------------------

    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        seq = self._live.get(id)
        if seq is None:
            return False
        self._end(seq, reason, error)
        return True

    def pause(self, id: str) -> bool:
        seq = self._live.get(id)
        if seq is None:
            return False
        if not seq.paused:
            seq.paused = True
            self._paused += 1
            self._waiting.discard(seq)
            self._preempted.discard(seq)
            if seq.phase == "preempted":
                self._give_slot_back(seq)
        return True

    def resume(self, id: str) -> bool:
        seq = self._live.get(id)
        if seq is None:
            return False
        if seq.paused:
            seq.paused = False
            self._paused -= 1
            if seq.phase == "waiting":
                self._waiting.insert(seq)
            elif seq.phase == "preempted":
                self._preempted.insert(seq)
        return True

    def fork(self, parent: str, child: SequenceSpec, tokens: Ids[int] = ()) -> None:
        """See Scheduler.fork. The child's Progress tells `tokens` only. Without a free slot it waits in line and
        computes again what the prefix cache has not kept. ValueError: something of the parent is in flight, the id is
        live, or the prompts differ."""
        source = self._resting(parent)
        if child.id in self._live:
            raise ValueError(f"sequence {child.id!r} is live already")
        if child.prompt != source.spec.prompt or child.salt != source.spec.salt:
            raise ValueError(f"{child.id!r} has not the prompt and salt of {parent!r}")
        self._check(child)
        if child.max_length <= len(source.tokens):
            raise InvalidRequest(f"{child.id!r}: max_length {child.max_length}; {parent!r} has {len(source.tokens)}")
        runs = source.phase == "running" and bool(self._slots)
        if not runs and self._count_waiting() >= self.need.max_queue:
            raise QueueFull(f"no slot is free and all {self.need.max_queue} places in the queue are taken")
        if runs:
            try:
                self.cache.fork(parent, child.id, source.entries)
            except ValueError:
                runs = False
        seq = self._enter(child)
        seq.tokens = list(source.tokens)
        seq.scored = seq.prompt_length - 1
        if runs:
            seq.slot = self._slots.pop()
            seq.phase = "running"
            seq.entries, seq.committed = source.entries, source.committed
            seq.prompt_step = source.prompt_step
            seq.cached = min(seq.entries, seq.prompt_length)
            self.running.insert(seq)
        else:
            self._waiting.insert(seq)
        self._choose(seq, tokens)

    def extend(self, id: str, tokens: Ids[int]) -> None:
        """See Scheduler.extend. KeyError: not live. ValueError: something is in flight."""
        seq = self._resting(id)
        seq.opening_due = True
        self._choose(seq, tokens)

    def _resting(self, id: str) -> Sequence:
        seq = self._live.get(id)
        if seq is None:
            raise KeyError(id)
        if seq.flying:
            raise ValueError(f"sequence {id!r} has {seq.flying} rows in flight")
        return seq

    def _choose(self, seq: Sequence, tokens: Ids[int]) -> None:
        if not tokens:
            return
        seq.tokens.extend(tokens)
        kept, reason = self._cut(seq, tuple(tokens))
        if reason is not None:
            self._end(seq, reason, None, kept)
        else:
            self._progress.append(Progress(id=seq.id, tokens=kept))

    # -- reports -----------------------------------------------------------------------------------------------------

    def is_live(self, id: str) -> bool:
        return id in self._live

    def has_work(self) -> bool:
        return bool(self._live or self._progress)

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][2].phase == "ended":
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            waiting=self._count_waiting(),
            running=len(self.running),
            preempted=self._lost,
            paused=self._paused,
            preemptions_total=self._preemptions,
        )

    def check_integrity(self) -> None:
        slots = sorted(self._slots + [seq.slot for seq in self._live.values() if seq.slot >= 0])
        if slots != list(range(self.need.max_rows)):
            raise AssertionError(f"slots are lost or held twice: {slots}")
        if self._lost != sum(seq.phase == "preempted" for seq in self._live.values()):
            raise AssertionError(f"{self._lost} preempted sequences are counted")
        for seq in self._live.values():
            rows = [row for _, rows in self._flights for row in rows if _is_of(row, seq)]
            counts = (len(rows), sum(row.query for row in rows), sum(row.samples for row in rows))
            if counts != (seq.flying, seq.flying_entries, seq.flying_samples):
                raise AssertionError(f"{seq.id!r} counts other rows in flight than {counts}")
            if (seq.slot >= 0) != (seq.phase in ("running", "preempted")):
                raise AssertionError(f"{seq.id!r} is {seq.phase} with slot {seq.slot}")
            lines = (seq in self.running, seq in self._waiting, seq in self._preempted)
            ready = not seq.paused
            right = (seq.phase == "running", seq.phase == "waiting" and ready, seq.phase == "preempted" and ready)
            if lines != right:
                raise AssertionError(f"{seq.id!r} is {seq.phase} but stands in the lines {lines}")
            if seq.phase == "running" and not seq.committed <= seq.entries <= len(seq.tokens):
                raise AssertionError(f"{seq.id!r}: {seq.committed} committed, {seq.entries} of {len(seq.tokens)}")
        self.cache.check_integrity()


def _is_of(row: RowPlan, seq: Sequence) -> bool:
    """Of the sequence's present life."""
    return row.id == seq.id and row.epoch == seq.epoch


def _in_order(plans: Ids[RowPlan], rows: Ids[RowResult]) -> Ids[RowResult]:
    """The result of each plan, empty for one that has none. KeyError: a result of a row that was not planned."""
    if [row.id for row in rows] == [plan.id for plan in plans]:
        return rows
    found = {row.id: row for row in rows}
    ordered = [found.pop(plan.id) if plan.id in found else RowResult(id=plan.id) for plan in plans]
    if found:
        raise KeyError(f"results of rows that the step has not: {sorted(found)}")
    return ordered
