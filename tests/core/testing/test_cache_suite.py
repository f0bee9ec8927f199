"""Broken cache managers, one for each rule: the suite catches every one of them, by the test that states the rule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random
from typing import Any, Self

import pytest
from msgspec.structs import replace

from pegboard.contracts.cache import CacheChanges, CacheManager, CacheNeed, CacheStats
from pegboard.testing.cache import CacheSuite
from pegboard.testing.conformance import run_suite
from pegboard_cache.options import PagedOptions
from pegboard_cache.paged import PagedCache


class OverBudget(PagedCache):
    """Takes a page more a group than it may."""

    @classmethod
    def create(cls, need: CacheNeed, options: PagedOptions) -> Self:
        return cls(replace(need, budget_bytes=need.budget_bytes + len(need.groups)), options)


class Promises(PagedCache):
    """Says that more fits than does."""

    def fits(self, length: int) -> bool:
        return super().fits(length - 16)


class AcceptsAll(PagedCache):
    @classmethod
    def refusals(cls, need: CacheNeed, options: PagedOptions) -> Sequence[str]:
        return [reason for reason in super().refusals(need, options) if "budget" not in reason]


class HandsOutTwice(PagedCache):
    """A page stays free though it was handed out."""

    def reserve(self, seq: str, length: int) -> bool:
        given = super().reserve(seq, length)
        table = self._seqs[seq].tables[0]
        if given and table and seq == "s3":
            table[-1] = self._seqs["s2"].tables[0][-1]
        return given


class HandsOutNull(PagedCache):
    def table(self, seq: str) -> tuple[tuple[int, ...], ...]:
        first, *others = super().table(seq)
        return (tuple(page - 1 for page in first), *others) if seq.startswith("s") else (first, *others)


class HalfReserves(PagedCache):
    """Takes what there is before it finds that it is not enough."""

    def reserve(self, seq: str, length: int) -> bool:
        if super().reserve(seq, length):
            return True
        held = self._seqs[seq]
        while self._pools[0].available:
            super().reserve(seq, held.capacity + 1)
        return False


class CommitsAnything(PagedCache):
    """Takes tokens for entries that nobody has reserved."""

    def commit(self, seq: str, tokens: Sequence[int], fence: int = 0) -> None:
        room = self._seqs[seq].reserved - self._seqs[seq].committed
        super().commit(seq, tokens[:room], fence)


class ForksThenRefuses(PagedCache):
    """Opens the child before it looks at the length."""

    def fork(self, parent: str, child: str, length: int) -> None:
        reserved = self._seqs[parent].reserved
        super().fork(parent, child, min(length, reserved))
        if length > reserved:
            raise ValueError(f"fork of {parent!r} at {length}")


class IgnoresStrangers(PagedCache):
    def release(self, seq: str, fence: int = 0) -> None:
        if seq in self._seqs:
            super().release(seq, fence)


class NeverTruncates(PagedCache):
    def truncate(self, seq: str, length: int, fence: int = 0) -> None:
        held = self._seqs[seq]
        if length < held.floor or length > held.reserved:
            raise ValueError(seq)


class Forgetful(PagedCache):
    """Tells the device of a table's first page only."""

    def take_changes(self) -> CacheChanges:
        changes = super().take_changes()
        return replace(changes, updates=tuple(replace(u, pages=u.pages[:2]) for u in changes.updates))


class Gossip(PagedCache):
    """Goes on to tell of sequences that have ended."""

    def release(self, seq: str, fence: int = 0) -> None:
        told = super().take_changes()
        self._late = replace(told, copies=())
        super().release(seq, fence)

    def take_changes(self) -> CacheChanges:
        late = getattr(self, "_late", CacheChanges())
        self._late = CacheChanges()
        return replace(super().take_changes(), updates=(*super().take_changes().updates, *late.updates))


class CopiesEarly(PagedCache):
    """Forks by copying, whether anybody writes or not."""

    def fork(self, parent: str, child: str, length: int) -> None:
        super().fork(parent, child, length)
        if length % 16:
            super().reserve(child, length + 1)


class NeverCopies(PagedCache):
    """Writes to a page that it shares."""

    def fork(self, parent: str, child: str, length: int) -> None:
        super().fork(parent, child, length)
        self._seqs[parent].shared = self._seqs[child].shared = False

    def check_integrity(self) -> None:
        pass


class ForksAnything(PagedCache):
    """Does not see that a window has moved on."""

    def fork(self, parent: str, child: str, length: int) -> None:
        dropped, self._seqs[parent].dropped = self._seqs[parent].dropped, [0] * len(self._groups)
        try:
            super().fork(parent, child, length)
        finally:
            self._seqs[parent].dropped = dropped


class SharesStates(PagedCache):
    """A fork goes on in its parent's recurrent state."""

    def take_changes(self) -> CacheChanges:
        changes = super().take_changes()
        return replace(changes, copies=tuple(c for c in changes.copies if self._groups[c.group].kind != "state"))


class FindsNothing(PagedCache):
    """Claims prefixes and has none."""

    def __init__(self, need: CacheNeed, options: PagedOptions) -> None:
        super().__init__(need, PagedOptions(prefix_reuse=False))


class FindsLess(PagedCache):
    """Attaches the first page only."""

    def _lookup(self, root: Any, tokens: Sequence[int]) -> list[Any]:
        return super()._lookup(root, tokens[:17])


class FindsAll(PagedCache):
    """Leaves nothing to run."""

    def _lookup(self, root: Any, tokens: Sequence[int]) -> list[Any]:
        return super()._lookup(root, [*tokens, 0])


class FindsReserved(PagedCache):
    """Offers pages as soon as they are reserved."""

    def reserve(self, seq: str, length: int) -> bool:
        given, held = super().reserve(seq, length), self._seqs[seq]
        if given and held.root is not None and not held.committed and seq in self._texts:
            held.tail = list(self._texts.pop(seq)[: len(held.tables[0]) * 16])[:length]
            self._register(held)
            held.tail = []
        return given

    def open(self, seq: str, tokens: Sequence[int], *, salt: str = "", reuse: bool = True) -> int:
        self._texts = {seq: tokens}
        return super().open(seq, tokens, salt=salt, reuse=reuse)

    def commit(self, seq: str, tokens: Sequence[int], fence: int = 0) -> None:
        held = self._seqs[seq]
        root, held.root = held.root, None
        super().commit(seq, tokens, fence)
        held.root = root

    def check_integrity(self) -> None:
        pass


class HashesPages(PagedCache):
    """Finds a page by its own tokens, whatever came before."""

    def _lookup(self, root: Any, tokens: Sequence[int]) -> list[Any]:
        from array import array

        found = super()._lookup(root, tokens)
        if not found and len(tokens) > 16:
            data = array("q", tokens[:16]).tobytes()
            found = [b for b in self._index.blocks() if b.tokens == data and b.pages[0]][:1]
        return found


class IgnoresSalts(PagedCache):
    def open(self, seq: str, tokens: Sequence[int], *, salt: str = "", reuse: bool = True) -> int:
        return super().open(seq, tokens, reuse=reuse)


class AlwaysReuses(PagedCache):
    def open(self, seq: str, tokens: Sequence[int], *, salt: str = "", reuse: bool = True) -> int:
        return super().open(seq, tokens, salt=salt)


class NeverResets(PagedCache):
    def reset_prefixes(self) -> None:
        for pool in self._pools:
            for page in list(pool.cached):
                del pool.cached[page]
                pool.unbind(page)
                pool.free.append(page)


class HoardsPrefixes(PagedCache):
    """A page that holds a prefix is never given to anybody else."""

    def reserve(self, seq: str, length: int) -> bool:
        held = self._seqs[seq]
        missing = -(-length // 16) - len(held.tables[0])
        return missing <= len(self._pools[0].free) and super().reserve(seq, length)


class CountsHitsOnly(PagedCache):
    def stats(self) -> CacheStats:
        return replace(super().stats(), prefix_queries=super().stats().prefix_hits)


class NoFences(PagedCache):
    def release(self, seq: str, fence: int = 0) -> None:
        super().release(seq)


class FirstFence(PagedCache):
    """A shared page comes back with the first of the steps that it waits for."""

    def release(self, seq: str, fence: int = 0) -> None:
        for g, table in enumerate(self._seqs[seq].tables):
            for page in table:
                if self._pools[g].refs[page] == 1:
                    self._pools[g].fences[page] = 0
        super().release(seq, fence)


class KeepsWindows(PagedCache):
    """Never lets go of a page."""

    def _slide(self, held: Any, fence: int) -> None:
        pass


class ShortWindows(PagedCache):
    """Lets go of a page one entry too early."""

    def _first_seen(self, query: int, window: int) -> int:
        return max(0, query - window + 2) // 16


class Miscounts(PagedCache):
    """Counts a page once for each table that names it."""

    def stats(self) -> CacheStats:
        stats = super().stats()
        held = sum(page > 0 for seq in self._seqs for table in self.table(seq) for page in table)
        return replace(stats, held=held, total=stats.total + held - stats.held)


class Leaks(PagedCache):
    """Every tenth sequence keeps a page."""

    turns = 0

    def release(self, seq: str, fence: int = 0) -> None:
        self.turns += 1
        if self.turns % 10 == 0:
            for pool, table in zip(self._pools, self._seqs[seq].tables, strict=True):
                pool.pin(table[-1])
                pool.refs[table[-1]] += 1
        super().release(seq, fence)


class LongStrides(PagedCache):
    """A page is full, and nobody has told of it."""

    def __init__(self, need: CacheNeed, options: PagedOptions) -> None:
        super().__init__(need, options)
        self.commit_stride = 3 * need.page_size


class Chancy(PagedCache):
    """Hands out pages by chance."""

    def reserve(self, seq: str, length: int) -> bool:
        for pool in self._pools:
            Random().shuffle(pool.free)
        return super().reserve(seq, length)


#: Tests that need a prefix to be found.
PREFIXES = (
    "test_reset_forgets_every_prefix test_other_tokens_are_not_found test_salts_separate_tenants "
    "test_cached_pages_make_room test_prefixes_are_counted test_the_last_token_is_always_run "
    "test_only_committed_entries_are_found test_reuse_can_be_declined"
)

#: The rule's own test, then others that see it, too.
BROKEN: dict[type[CacheManager], str] = {
    OverBudget: "test_pages_keep_to_the_budget test_cached_pages_make_room",
    Promises: "test_what_fits_can_be_held",
    AcceptsAll: "test_a_budget_that_is_too_small_is_refused",
    HandsOutTwice: "test_no_page_belongs_to_two",
    HandsOutNull: "test_no_page_belongs_to_two",
    HalfReserves: "test_reserve_takes_all_or_nothing",
    CommitsAnything: "test_wrong_calls_change_nothing",
    ForksThenRefuses: "test_wrong_calls_change_nothing",
    IgnoresStrangers: "test_sequences_that_are_not_open_are_key_errors",
    NeverTruncates: "test_truncate_gives_back_what_lies_beyond",
    Forgetful: "test_the_device_learns_every_page test_forks_do_not_see_each_other",
    Gossip: "test_the_ended_are_not_mentioned test_forks_do_not_see_each_other test_the_device_learns_every_page",
    CopiesEarly: "test_a_fork_shares_pages_until_one_writes test_stats_add_up",
    NeverCopies: "test_forks_do_not_see_each_other test_a_fork_shares_pages_until_one_writes",
    ForksAnything: "test_a_fork_behind_a_window_is_refused",
    SharesStates: "test_a_state_is_copied_by_a_fork",
    FindsNothing: "test_a_committed_prefix_is_found " + PREFIXES,
    FindsLess: "test_a_committed_prefix_is_found test_only_committed_entries_are_found",
    FindsAll: "test_the_last_token_is_always_run",
    FindsReserved: "test_only_committed_entries_are_found",
    HashesPages: "test_other_tokens_are_not_found test_salts_separate_tenants",
    IgnoresSalts: "test_salts_separate_tenants",
    LongStrides: "test_commits_may_come_in_strides",
    AlwaysReuses: "test_reuse_can_be_declined",
    NeverResets: "test_reset_forgets_every_prefix",
    HoardsPrefixes: "test_cached_pages_make_room test_nothing_leaks",
    CountsHitsOnly: "test_prefixes_are_counted",
    NoFences: "test_pages_wait_for_their_fence test_a_shared_page_waits_for_the_last_of_its_fences",
    FirstFence: "test_a_shared_page_waits_for_the_last_of_its_fences",
    KeepsWindows: "test_windows_let_go_of_what_nobody_sees test_a_fork_behind_a_window_is_refused",
    ShortWindows: "test_windows_keep_what_is_seen test_forks_do_not_see_each_other",
    Miscounts: "test_stats_add_up test_a_fork_shares_pages_until_one_writes",
    Leaks: "test_nothing_leaks",
    Chancy: "test_the_same_calls_give_the_same_pages",
}


def suite_of(broken: type[CacheManager]) -> type[CacheSuite]:
    claims = ("prefixes", "windows", "states")
    fields = {"part": broken, "options": PagedOptions(), "claims": claims, "prefix_unit": 16, "grid": "normal"}
    return type("Broken", (CacheSuite,), fields)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_caught_by_its_test(broken: type[CacheManager]) -> None:
    """And by no other than those that the table names: with PEGBOARD_FULL the whole suite is run for that."""
    expected = BROKEN[broken].split()
    keyword = "not random_use" if os.environ.get("PEGBOARD_FULL") else expected[0]
    failed = {outcome.test for outcome in run_suite(suite_of(broken), keyword) if outcome.result == "failed"}
    assert failed == (set(expected) if os.environ.get("PEGBOARD_FULL") else {expected[0]})


@pytest.mark.parametrize("broken", [NeverCopies, NoFences, ShortWindows, HashesPages, Leaks, Forgetful])
def test_long_random_use_finds_it_too(broken: type[CacheManager]) -> None:
    few = type("Few", (suite_of(broken),), {"grid": "small", "paged": (("full",), ("full", "window"))})
    outcomes = run_suite(few, "test_long_random_use")
    assert "failed" in {outcome.result for outcome in outcomes}


def test_random_use_finds_it_too() -> None:
    few = type("Few", (suite_of(NoFences),), {"grid": "normal", "paged": (("full",),)})
    (outcome,) = run_suite(few, "test_random_use")
    assert outcome.result == "failed"


def test_a_manager_without_prefixes_or_windows_is_skipped_where_it_says_so() -> None:
    class Plain(PagedCache):
        @classmethod
        def refusals(cls, need: CacheNeed, options: PagedOptions) -> Sequence[str]:
            kinds = {group.kind for group in need.groups} - {"full"}
            return [*super().refusals(need, options), *(f"no groups of kind {kind}" for kind in sorted(kinds))]

    fields = {"part": Plain, "options": PagedOptions(prefix_reuse=False), "grid": "small"}
    outcomes = run_suite(type("Honest", (CacheSuite,), fields))
    assert {outcome.result for outcome in outcomes} == {"passed", "skipped"}
    reasons = {outcome.test: outcome.reason for outcome in outcomes if outcome.result == "skipped"}
    assert "no groups of kind window" in reasons["test_windows_keep_what_is_seen"]
    assert "finds no prefixes" in reasons["test_a_committed_prefix_is_found"]
    claimed = type("Claims", (CacheSuite,), fields | {"claims": ("windows", "states")})
    (refused,) = run_suite(claimed, "test_serves_what_is_declared")
    assert refused.result == "failed"
    assert "claim windows: no groups of kind window" in refused.reason
