"""Schedulers: which request runs how many tokens in the next step. Pure host objects, testable without a model.

Lengths. A sequence has tokens (known to the host), entries committed (computed by retired steps) and entries
launched (an upper bound while drafts fly). A launched step may not have retired when the next is planned: the
next row of such a sequence takes its input from the device (`tokens` empty) and `start` is the upper bound.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import msgspec

from .cache import CacheManager, EntryMove, PageCopy
from .sampler import SamplingParams, SlotOpening, TokenLogprobs
from .shadow import ShadowCheck

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence as admission hands it over: validated, with every default resolved."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    #: Length of prompt + output that ends it ("length").
    max_length: int
    #: Ids that end it ("stop"), once min_tokens were chosen.
    stop_ids: frozenset[int] = frozenset()
    #: Higher runs earlier.
    priority: int = 0
    #: On the scheduler's clock, seconds.
    arrival: float = 0.0
    deadline: float | None = None
    #: Prefixes are shared only between equal salts.
    salt: str = ""
    #: Fork the prompt's entries from this sequence once they are launched (n > 1).
    parent: str | None = None
    #: Its next token must be known to the host before the one after is launched: runs at depth 0.
    needs_host_token: bool = False
    #: Drafts a step at most.
    max_drafts: int = 0
    #: The token that a row of it chose is not taken: Progress tells the row's log-probabilities without tokens, and it
    #: rests until `extend` or `fork`. For schedulers with `Scheduler.host_chooses`; comes with `needs_host_token`.
    host_chooses: bool = False


class RowPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of a step: `query` tokens of one sequence. A scheduler may give the same one again."""

    id: str
    slot: int
    #: Query tokens, >= 1: a prefill chunk, 1 (decode), or 1 + drafts.
    query: int
    #: Position of the first query: exact when `tokens` is given, else an upper bound (see StepPlan.reach).
    start: int
    #: The ids of the first `query - drafts` queries when the host knows them, else empty: the device feeds its last
    #: token. Drafts always come from the device.
    tokens: tuple[int, ...]
    #: How many of the queries are drafts (the device's speculator fills them).
    drafts: int = 0
    #: Whether the row chooses a token (not so for all but the last prefill chunk).
    samples: bool = True
    #: Prompt tokens whose log-probability is wanted: the ids that follow each query, -1 for none; empty: no.
    targets: tuple[int, ...] = ()
    #: As SamplingParams.logprobs: None for a row that wants none, whatever its neighbours want.
    logprobs: int | None = None
    #: With `targets`: how many of the most probable tokens to report beside each.
    top_targets: int = 0
    #: The slot's state must be built before this row.
    opening: SlotOpening | None = None
    #: Goes up when the sequence is preempted: results of older steps are void.
    epoch: int = 0


class SlotPages(msgspec.Struct, frozen=True, kw_only=True):
    """Pages `start` ... of a slot's table in one group."""

    slot: int
    group: int
    start: int
    pages: tuple[int, ...]
    #: See TableUpdate.dropped.
    dropped: int = 0


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Device work in this order: copies, moves, tables, openings, rows."""

    #: 1, 2, 3, ...
    id: int
    #: Rows with query <= the decode width first.
    rows: tuple[RowPlan, ...]
    copies: tuple[PageCopy, ...] = ()
    moves: tuple[EntryMove, ...] = ()
    tables: tuple[SlotPages, ...] = ()
    #: Entries that a row which the device feeds has after this step, at most. None: as `start` and `query` of each say.
    reach: int | None = None


class RowResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one row of a retired step gave."""

    id: str
    epoch: int = 0
    #: Tokens chosen: none (no sample), one, or accepted drafts and one more.
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    #: The row failed (NaN logits, say); the request ends with "error".
    error: str | None = None
    #: With an error: the sequence's entries can't be trusted, so no prefix of them may be reused.
    tainted: bool = False


class DraftReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the drafts of one step, and how many pay."""

    #: Rows that had a first, a second, ... draft.
    proposed: tuple[int, ...] = ()
    #: Rows in which it was accepted.
    accepted: tuple[int, ...] = ()
    #: Drafts that a row is given from now on, at most.
    allowed: int
    #: How many times as fast as without drafts it goes: by acceptance and cost, and as measured over the last steps.
    #: None: not known yet.
    predicted: float | None = None
    measured: float | None = None
    #: Tokens that a row must keep in a step so that its drafts cost nothing.
    break_even: float | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    rows: tuple[RowResult, ...]
    #: Seconds of the executor's host beside the model and beside waiting: building the batch and reading its result.
    #: None: it does not tell.
    host_seconds: float | None = None
    #: Score mass a page, per sequence, when the cache manager asks for it.
    score_mass: tuple[tuple[str, tuple[float, ...]], ...] = ()
    #: None: the executor runs no speculator.
    drafts: DraftReport | None = None
    #: What shadow mode found in this step, one a shadowed part; empty for a step that was not compared.
    shadow: tuple[ShadowCheck, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What became final for one sequence. Exactly one with a finish_reason is given for each admitted sequence."""

    id: str
    #: The token that ended it ("stop") is the last of them.
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    #: With a finish_reason: what beam search ranks by.
    score: float | None = None
    #: With a finish_reason: prompt tokens that were found in the prefix cache, and preemptions.
    cached_tokens: int = 0
    preemptions: int = 0


class SchedulerNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's limits."""

    #: Slots, and rows a step at most.
    max_rows: int
    #: Tokens a step at most.
    max_step_tokens: int
    #: Sequences waiting at most.
    max_queue: int
    max_length: int
    #: Steps that may fly.
    depth: int = 0
    #: Rows with at most this many queries are decode rows (1 + drafts).
    decode_width: int = 1


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    waiting: int
    running: int
    preempted: int
    paused: int
    preemptions_total: int = 0


class Scheduler(ABC):
    """Decides. The engine never makes two calls at a time, but they come from several threads.

    Invariants: every admitted sequence ends with exactly one Progress that has a finish_reason; rows and tokens of
    a plan stay within the limits; a slot is held by one sequence at a time, from its first row to its end; pages of
    a plan's rows are reserved before it is returned; a sequence appears once in a plan; when nothing is left, every
    page has been released.

    Nobody waits for ever: a sequence that was admitted, and is not paused, ends. Those that hold pages while they wait
    for more can block each other, so reserve all of `max_length` at once, or preempt: release the pages of one, void
    what of it flies (the next `epoch`), and run it again from all its tokens, in the same slot, with a new `opening`.
    A child (`SequenceSpec.parent`) may fork its parent's prompt or compute it anew: its tokens are the same.
    """

    #: It serves sequences with `SequenceSpec.host_chooses`; without it beam search is refused.
    host_chooses: bool = False

    @classmethod
    @abstractmethod
    def refusals(cls, need: SchedulerNeed, options: Any) -> Sequence[str]: ...

    @classmethod
    @abstractmethod
    def create(cls, need: SchedulerNeed, options: Any, *, cache: CacheManager, clock: Callable[[], float]) -> Self:
        """`cache` is the scheduler's own from now on; nobody else calls it. `clock` gives seconds."""

    @abstractmethod
    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        """Admit all or none. InvalidRequest: one can never run (an empty prompt, no room for a token after it, longer
        than `need.max_length` or than the cache holds; more at once than the queue has places). QueueFull: no room
        now. ValueError: an id that is live already, or given twice."""

    @abstractmethod
    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        """End a sequence from outside (abort, a stop string, a failed row); False if it is not live. Its Progress
        comes with the next `commit`; tokens that still fly are discarded."""

    @abstractmethod
    def pause(self, id: str) -> bool:
        """Plan no more rows of this sequence until `resume` (a slow consumer). False if it is not live."""

    @abstractmethod
    def resume(self, id: str) -> bool: ...

    @abstractmethod
    def fork(self, parent: str, child: SequenceSpec, tokens: Sequence[int] = ()) -> None:
        """Split a running sequence with nothing in flight: `child` gets the parent's tokens and entries, then
        `tokens` (a beam's own choice), as if it had chosen them itself. The child's Progress tells `tokens` only.
        KeyError: no such parent. ValueError: rows of the parent are in flight, the child's id is live, or its prompt or
        salt is another. InvalidRequest: no room for a token. QueueFull. What raises has changed nothing."""

    @abstractmethod
    def extend(self, id: str, tokens: Sequence[int]) -> None:
        """The host chose these tokens for a running sequence with nothing in flight (beams, forced tokens). They are
        taken like its own: told with the next `commit`, dropped behind a stop or `max_length`, which ends it. Its next
        row has a new `opening`. KeyError: not live. ValueError: rows of it are in flight."""

    @abstractmethod
    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run now. Legal while up to `depth` plans fly."""

    @abstractmethod
    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        """Take in a retired step (steps retire in order; None: nothing retired) and return all that became final
        since the last call, including ends by deadline, `finish` and `extend`. Tokens behind the one that ends a
        sequence are dropped, and so are results of an older epoch. After a `tainted` row no prefix that may hold its
        entries can be found any more (`CacheManager.reset_prefixes`)."""

    @abstractmethod
    def fail(self, step: int, error: str) -> None:
        """A launched step raised and will never retire: its sequences end with "error", their pages come back.
        ValueError: no such step is in flight."""

    @abstractmethod
    def is_live(self, id: str) -> bool:
        """Whether the sequence was admitted and has not ended."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether any sequence is live or any progress is not yet taken."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """The earliest deadline of a live sequence, on the scheduler's clock."""

    @abstractmethod
    def stats(self) -> SchedulerStats: ...

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant of the scheduler or of its cache is broken."""
