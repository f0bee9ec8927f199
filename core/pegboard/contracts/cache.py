"""The KV cache manager: a pure host object that owns page ids and never touches a device tensor.

The runner allocates the tensors (one set a layer, from the layout) and does the copies that the manager lists.
Entries of a sequence are numbered 0, 1, ... in the order they were written; entry e lies in page e // page_size
of the sequence's table. Page 0 of every group is the null page: never handed out, safe to read; idle rows of a
captured step write there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Self

import msgspec

from .attention import KVLayout


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one page table: the same layout and the same lifetime of entries."""

    index: int
    #: full: all entries live; window: entries older than `window` may be dropped; state: one page is the whole
    #: recurrent state of a sequence after some token, `page_size` does not apply.
    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    layout: KVLayout
    window: int | None = None
    #: Bytes of one page over all layers of the group.
    page_bytes: int


class CacheNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a manager is asked to serve."""

    groups: tuple[CacheGroup, ...]
    #: Entries a page; a power of two >= 16.
    page_size: int
    #: Bytes for all pages together.
    budget_bytes: int
    max_rows: int
    #: Longest sequence that the engine admits, in entries.
    max_length: int
    #: Width of the widest verify step, 1 + drafts.
    max_query: int = 1


class PageCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Copy one whole page in every layer of a group, before the step that lists it. Tier 0 is the device's
    memory, 1 the host's, 2 disk; a swap or an offload is a copy between tiers."""

    group: int
    source: int
    target: int
    source_tier: int = 0
    target_tier: int = 0


class EntryMove(msgspec.Struct, frozen=True, kw_only=True):
    """Move one entry (eviction inside a page); flat entries are page * page_size + offset."""

    group: int
    source: int
    target: int


class TableUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Pages `start`, `start + 1`, ... of a sequence's table in one group are now `pages`."""

    seq: str
    group: int
    start: int
    pages: tuple[int, ...]
    #: Entries of this sequence and group dropped so far by an eviction that closes the gap: the entry of a position
    #: is position - dropped. 0 where entries keep their place (windows name the null page instead).
    dropped: int = 0


class CacheChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the device must learn before the next step, in this order: copies, moves, table updates."""

    copies: tuple[PageCopy, ...] = ()
    moves: tuple[EntryMove, ...] = ()
    updates: tuple[TableUpdate, ...] = ()


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Pages over all groups. total = free + cached + held + fenced, at any time."""

    total: int
    #: Empty, ready to hand out.
    free: int
    #: Hold a reusable prefix, named by no sequence; handed out when `free` is empty.
    cached: int
    #: Named by at least one open sequence.
    held: int
    #: Released, waiting for a launched step to retire.
    fenced: int
    #: Prompt tokens asked for and found, since the start.
    prefix_queries: int = 0
    prefix_hits: int = 0


class CacheManager(ABC):
    """Pages for sequences. Called by the scheduler only.

    *Fences.* A step that was launched may still write to pages after its sequence ended. `fence` is the id of the
    last launched step that may name the pages (0: none); they become reusable after `retire(step)` with
    step >= fence. Steps retire in order.

    *Atomicity.* A method that raises or returns False has changed nothing.

    Errors: KeyError for a sequence that is not open, ValueError for a length that goes backwards or is beyond what
    was reserved.
    """

    @classmethod
    @abstractmethod
    def refusals(cls, need: CacheNeed, options: Any) -> Sequence[str]:
        """Why this manager can't serve `need`; empty: it can. Says so too when the budget is below what one
        sequence of `max_length` entries needs and the manager can't shorten it."""

    @classmethod
    @abstractmethod
    def create(cls, need: CacheNeed, options: Any) -> Self:
        """A manager with all pages free."""

    @property
    @abstractmethod
    def pages(self) -> tuple[int, ...]:
        """Pages to allocate per group, the null page included. Fixed for life."""

    @abstractmethod
    def fits(self, length: int) -> bool:
        """Whether one sequence of `length` entries could be held by an otherwise empty cache."""

    @abstractmethod
    def open(self, seq: str, tokens: Sequence[int], *, salt: str = "", reuse: bool = True) -> int:
        """Begin a sequence and attach the longest cached prefix of `tokens` that belongs to the same salt.

        Returns the number of entries already computed: at most len(tokens) - 1, since the last token must be run
        to get its logits. `reuse=False` attaches nothing. A prefix matches by strong hash and by comparison of its
        tokens. Reserves nothing."""

    @abstractmethod
    def reserve(self, seq: str, length: int) -> bool:
        """Make entries 0 .. length-1 writable from the sequence's next entry on. False, with nothing changed, when
        there are not enough pages. A shared page that would be written is copied first (copy on write)."""

    @abstractmethod
    def commit(self, seq: str, tokens: Sequence[int], fence: int = 0) -> None:
        """The next len(tokens) entries are computed and their tokens are final: they may be reused by others.
        Pages that no later query of a windowed group can see are released under `fence`."""

    @abstractmethod
    def truncate(self, seq: str, length: int, fence: int = 0) -> None:
        """Give back pages reserved beyond `length` entries (>= committed), e.g. after drafts were rejected."""

    @abstractmethod
    def fork(self, parent: str, child: str, length: int) -> None:
        """Open `child` as a copy of the first `length` entries of `parent` (written or launched, all of them
        committed or to be so). Pages are shared until one of the two writes. The child has committed what the parent
        has of them; the rest it commits itself. Neither writes those entries again. ValueError, with nothing changed:
        `child` is open, `length` is beyond what was reserved, a windowed group has dropped what a query at `length`
        would see, a recurrent state stands elsewhere than at `length` or finds no page for its copy."""

    @abstractmethod
    def release(self, seq: str, fence: int = 0) -> None:
        """End a sequence. Its pages return under `fence`; committed full pages stay findable until evicted."""

    @abstractmethod
    def retire(self, step: int) -> None:
        """Step `step` has retired, and with it all before it."""

    @abstractmethod
    def take_changes(self) -> CacheChanges:
        """What the device must learn since the last call. Changes of released sequences are left out."""

    @abstractmethod
    def table(self, seq: str) -> tuple[tuple[int, ...], ...]:
        """The sequence's page ids per group (0: dropped from a window). For tests, reports and migration; the step
        path uses `take_changes`."""

    @abstractmethod
    def stats(self) -> CacheStats: ...

    @abstractmethod
    def reset_prefixes(self) -> None:
        """Forget every reusable prefix (after weights changed, or to isolate tenants)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError, naming the pages, when an invariant is broken: every page is in exactly one of free,
        cached, held, fenced; reference counts equal the tables that name a page; no page is writable by two."""

    #: While a sequence grows token by token the scheduler may hold `commit` back until it has a multiple of this many
    #: entries: to the manager nothing changes in between.
    commit_stride: int = 1

    #: True: the attention backend must add up score mass (see AttentionBackend), and the executor reports it.
    needs_score_mass: bool = False

    def observe_score_mass(self, seq: str, mass: Sequence[float], fence: int = 0) -> None:  # noqa: B027
        """Score mass of the sequence's pages since the last report, for eviction by importance. The manager may
        answer with table updates and moves in the next `take_changes`. Default: ignored."""
