"""Conformance of cache managers: who holds which page, when it returns, what is found again, what the device learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, ClassVar

import pytest

from pegboard.contracts.cache import CacheManager, CacheNeed

from .cache_use import PAGE_SIZE, WINDOW, CacheUse, make_need
from .conformance import Candidate, Suite, check
from .raising import raises

#: No two tokens alike.
TEXT = tuple(range(100, 196))
MAX_LENGTH = len(TEXT)

Kinds = tuple[str, ...]


class CacheSuite(Suite, standard=True):
    """A cache manager against `pegboard.contracts.cache`. Page size 16, windows of 20 entries.

    Features: "prefixes" (committed pages are found again), "windows", "states" (groups of that kind)."""

    role = "cache"
    features = ("prefixes", "windows", "states")
    axes = {"kinds": "kinds", "paged": "paged"}

    #: Groups that are tried; a test is skipped where the manager refuses them. `paged`: those without a state.
    kinds: ClassVar[tuple[Kinds, ...]] = (("full",), ("window",), ("full", "window"), ("full", "state"))
    paged: ClassVar[tuple[Kinds, ...]] = (("full",), ("window",), ("full", "window"))
    #: Declared: prefixes are found in multiples of so many entries; 1 promises nothing.
    prefix_unit: ClassVar[int] = 1

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, CacheNeed]]:
        yield "a group of kind full", make_need()
        if "windows" in cls.claims:
            yield "claim windows", make_need(("full", "window"))
        if "states" in cls.claims:
            yield "claim states", make_need(("full", "state"))

    @pytest.fixture
    def make_cache(self, candidate: Candidate) -> Callable[..., CacheManager]:
        """make_cache(kinds=("full",), **fields of `make_need`); skips when the manager refuses."""

        def make(kinds: Kinds = ("full",), **fields: Any) -> CacheManager:
            made: CacheManager = candidate.create(make_need(kinds, **fields))
            return made

        return make

    @pytest.fixture
    def make_use(self, candidate: Candidate) -> Callable[..., CacheUse]:
        """Like make_cache, in use."""

        def make(kinds: Kinds = ("full",), **fields: Any) -> CacheUse:
            need = make_need(kinds, **fields)
            return CacheUse(candidate.create(need), need, self.prefix_unit)

        return make

    @pytest.fixture
    def finds(self, make_cache: Callable[..., CacheManager]) -> bool:
        """Whether prefixes are found at all. Skips if they are not, and that is not declared."""
        cache = make_cache()
        compute(cache, "a", TEXT)
        found = cache.open("b", TEXT) > 0
        if not found and "prefixes" not in self.claims:
            pytest.skip("the manager finds no prefixes, and does not claim to")
        check(found, 'claims "prefixes", and finds none of 96 committed entries')
        return found

    # -- budget ------------------------------------------------------------------------------------------------------

    def test_pages_keep_to_the_budget(self, candidate: Candidate, kinds: Kinds) -> None:
        """All pages together, null pages included, cost no more than the budget, and each group has one to give."""
        for pages in (7, 20, 100):
            need = make_need(kinds, pages=pages)
            cache = candidate.create(need)
            check(len(cache.pages) == len(need.groups), f"{len(cache.pages)} page counts for {len(need.groups)} groups")
            cost = sum(n * group.page_bytes for n, group in zip(cache.pages, need.groups, strict=True))
            check(cost <= need.budget_bytes, f"pages of {cost} bytes, the budget is {need.budget_bytes}")
            check(min(cache.pages) >= 2, f"a group has only its null page: {cache.pages}")
            stats = cache.stats()
            check(stats.free == stats.total == sum(cache.pages) - len(cache.pages), f"not all pages are free: {stats}")

    def test_what_fits_can_be_held(self, make_cache: Callable[..., CacheManager], kinds: Kinds) -> None:
        """`fits` is what an empty cache can hold: not less, since requests are refused by it, and not more, since the
        engine would wait for ever."""
        cache = make_cache(kinds, pages=7)
        check(cache.fits(1) and cache.fits(MAX_LENGTH), f"{MAX_LENGTH} entries don't fit, which was not refused")
        check(not cache.fits(16 * 10_000), "160000 entries fit into 7 pages of 16")
        longest = next(length for length in range(MAX_LENGTH, 16 * 10_000) if not cache.fits(length + 1))
        for length in (1, PAGE_SIZE, PAGE_SIZE + 1, longest):
            cache = make_cache(kinds, pages=7)
            cache.open("a", TEXT)
            check(cache.reserve("a", length), f"{length} entries fit, but an empty cache has no pages for them")

    def test_a_budget_that_is_too_small_is_refused(self, candidate: Candidate) -> None:
        """What can't hold one longest sequence is refused, with a reason, before anything is made."""
        reasons = candidate.refusals(make_need(pages=2))
        check(bool(reasons), f"2 pages were accepted for a sequence of {MAX_LENGTH} entries")
        check(all(isinstance(r, str) and r for r in reasons), f"reasons are texts, not {reasons!r}")

    # -- ownership ---------------------------------------------------------------------------------------------------

    def test_no_page_belongs_to_two(self, make_cache: Callable[..., CacheManager], kinds: Kinds) -> None:
        """Until nothing is left, each page is handed out once, and the null page never."""
        cache = make_cache(kinds)
        owner: dict[tuple[int, int], str] = {}
        for number in range(40):
            name = f"s{number}"
            cache.open(name, unlike(number))
            if not cache.reserve(name, 33):
                break
            for g, table in enumerate(cache.table(name)):
                for page in table:
                    check(0 < page < cache.pages[g], f"page {page} of group {g}, which has pages 1 to {cache.pages[g]}")
                    check((g, page) not in owner, f"page {page} of group {g} is {name}'s and {owner.get((g, page))}'s")
                    owner[g, page] = name
        else:
            check(False, "40 sequences of 3 pages found room in 20 pages")

    def test_reserve_takes_all_or_nothing(self, make_cache: Callable[..., CacheManager], kinds: Kinds) -> None:
        """False: no page of any group has moved, and the device has nothing to learn."""
        cache = make_cache(kinds, pages=7)
        cache.open("a", TEXT)
        check(cache.reserve("a", 80), "80 entries don't fit into 7 empty pages")
        cache.open("b", unlike(1))
        cache.take_changes()
        before = snapshot(cache, "a", "b")
        check(not cache.reserve("b", MAX_LENGTH), "12 pages were handed out of 7")
        unchanged(cache, before, "reserve that returned False")

    @pytest.mark.parametrize("call", ["open", "commit", "truncate", "reserve", "fork", "fork twice", "too long"])
    def test_wrong_calls_change_nothing(self, make_cache: Callable[..., CacheManager], kinds: Kinds, call: str) -> None:
        """ValueError for lengths that go backwards or beyond what was reserved, and for what is open already."""
        cache = make_cache(kinds)
        cache.open("a", TEXT)
        cache.reserve("a", 40)
        cache.commit("a", TEXT[:36])
        cache.take_changes()
        before = snapshot(cache, "a")
        calls: dict[str, Callable[[], Any]] = {
            "open": lambda: cache.open("a", TEXT),
            "commit": lambda: cache.commit("a", TEXT[36:41]),
            "truncate": lambda: cache.truncate("a", 35),
            "reserve": lambda: cache.reserve("a", 35),
            "fork": lambda: cache.fork("a", "b", 41),
            "fork twice": lambda: cache.fork("a", "a", 36),
            "too long": lambda: cache.truncate("a", 41),
        }
        raises(ValueError, calls[call], call)
        unchanged(cache, before, call)
        raises(KeyError, lambda: cache.table("b"), "table of a fork that was refused")

    def test_sequences_that_are_not_open_are_key_errors(self, make_cache: Callable[..., CacheManager]) -> None:
        cache = make_cache()
        before = snapshot(cache)
        calls: dict[str, Callable[[], Any]] = {
            "reserve": lambda: cache.reserve("nobody", 1),
            "commit": lambda: cache.commit("nobody", [1]),
            "truncate": lambda: cache.truncate("nobody", 0),
            "fork": lambda: cache.fork("nobody", "child", 0),
            "release": lambda: cache.release("nobody"),
            "table": lambda: cache.table("nobody"),
        }
        for name, call in calls.items():
            raises(KeyError, call, name)
        unchanged(cache, before, "a call for nobody")

    def test_truncate_gives_back_what_lies_beyond(self, make_cache: Callable[..., CacheManager], paged: Kinds) -> None:
        cache = make_cache(paged)
        cache.open("a", TEXT)
        cache.reserve("a", 64)
        cache.commit("a", TEXT[:10])
        held = cache.stats().held
        cache.truncate("a", 17, fence=3)
        check(cache.stats().held == held - 2 * len(paged), "pages beyond entry 17 of 64 are still held")
        check(cache.stats().fenced == 2 * len(paged), "the steps that fly may still write to those pages")
        cache.retire(3)
        check(cache.stats().fenced == 0, "pages are fenced by a step that has retired")
        check(cache.reserve("a", 64), "what was given back is not there")
        check(all(0 not in table for table in cache.table("a")), "reserved pages are missing from the table")

    # -- what the device learns --------------------------------------------------------------------------------------

    def test_the_device_learns_every_page(self, make_use: Callable[..., CacheUse], paged: Kinds) -> None:
        """Tables made of `take_changes` alone name the pages of `table`, whatever happened in between."""
        use = make_use(paged)
        use.open("a", TEXT[:40])
        for length in (5, 30, 3, 20):
            use.run_row("a", TEXT[len(use.lives["a"].tokens) :][:length])
            use.commit("a", length)
            use.learn()
        use.fork("a", "b", len(use.lives["a"].tokens))
        use.learn()
        use.run_row("b", [1, 2, 3])
        use.truncate("b")
        use.run_row("b", [4] * 14)
        use.learn()
        check(use.cache.take_changes().updates == (), "changes are told twice")

    def test_the_ended_are_not_mentioned(self, make_cache: Callable[..., CacheManager]) -> None:
        cache = make_cache()
        cache.open("a", TEXT)
        cache.reserve("a", 40)
        cache.release("a")
        changes = cache.take_changes()
        check(changes.updates == () and changes.copies == (), f"changes of a released sequence: {changes}")

    # -- forks -------------------------------------------------------------------------------------------------------

    def test_a_fork_shares_pages_until_one_writes(self, make_cache: Callable[..., CacheManager]) -> None:
        """No page is taken by the fork itself; who writes first gets a copy of the tail page, and only of that."""
        for writer in ("parent", "child"):
            cache = make_cache()
            cache.open("parent", TEXT)
            cache.reserve("parent", 20)
            cache.take_changes()
            held, old = cache.stats().held, cache.table("parent")[0]
            cache.fork("parent", "child", 20)
            check(cache.stats().held == held, "a fork takes pages")
            check(cache.table("child")[0][:2] == old[:2], "a fork has other pages than its parent")
            cache.take_changes()
            check(cache.reserve(writer, 21), "no page for a copy")
            new = cache.table(writer)[0]
            copies = [(copy.group, copy.source, copy.target) for copy in cache.take_changes().copies]
            check(new[0] == old[0] and new[1] != old[1], f"the {writer} writes to {new}, the pages of both are {old}")
            check(copies == [(0, old[1], new[1])], f"copies {copies}, expected page {old[1]} to {new[1]}")
            cache.reserve("child" if writer == "parent" else "parent", 21)
            check(cache.take_changes().copies == (), "the last holder of a page copies it, too")

    @pytest.mark.parametrize("first", ["parent", "child"])
    @pytest.mark.parametrize("length", [16, 20, 31, 40])
    def test_forks_do_not_see_each_other(
        self, make_use: Callable[..., CacheUse], paged: Kinds, first: str, length: int
    ) -> None:
        """Both go on, in either order, with steps in flight; each finds what it wrote, and so does a fork of a fork."""
        use = make_use(paged)
        use.open("parent", TEXT)
        use.run_row("parent", TEXT[:length])
        use.commit("parent", length - 4)
        use.fork("parent", "child", length)
        for name in (first, *({"parent", "child"} - {first})):
            use.run_row(name, [hash(name) % 50, 1, 2])
            use.check()
        use.fork("child", "grandchild", length + 3)
        use.run_row("grandchild", [3] * 20)
        use.run_row("child", [4] * 20)
        use.check()
        use.release("parent")
        use.retire(9)
        use.open("other", unlike(3))
        use.run_row("other", unlike(3)[:60])
        use.check()
        use.finish()

    def test_a_fork_behind_a_window_is_refused(self, make_cache: Callable[..., CacheManager]) -> None:
        cache = make_cache(("full", "window"))
        compute(cache, "a", TEXT[:64])
        cache.take_changes()
        before = snapshot(cache, "a")
        raises(ValueError, lambda: cache.fork("a", "b", 20), "fork at 20, whose window was dropped")
        unchanged(cache, before, "a fork that was refused")
        cache.fork("a", "b", 63)

    def test_a_state_is_copied_by_a_fork(self, make_cache: Callable[..., CacheManager]) -> None:
        """One page holds the whole state, whatever the length; a fork gets its own, filled before its first step."""
        cache = make_cache(("full", "state"))
        compute(cache, "a", TEXT[:40])
        (page,) = cache.table("a")[1]
        cache.take_changes()
        cache.fork("a", "b", 40)
        (copy,) = cache.table("b")[1]
        check(copy != page and copy > 0, f"the fork's state lies in page {copy}, its parent's in {page}")
        copies = [(c.source, c.target) for c in cache.take_changes().copies if c.group == 1]
        check(copies == [(page, copy)], f"copies {copies} of the state, expected {page} to {copy}")
        raises(ValueError, lambda: cache.fork("a", "c", 30), "fork at 30 of a state that stands at 40")

    # -- prefixes ----------------------------------------------------------------------------------------------------

    def test_a_committed_prefix_is_found(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        """The longest there is (whole pages at least), by the pages that hold it, while its owner lives and after."""
        cache = make_cache()
        compute(cache, "a", TEXT[:70])
        pages = cache.table("a")[0]
        for number, probe in enumerate([(*TEXT[:50], 7), TEXT, (*TEXT[:32], 7, *TEXT[33:])]):
            common = next((i for i, (x, y) in enumerate(zip(probe, TEXT[:70], strict=False)) if x != y), 70)
            whole = common // PAGE_SIZE * PAGE_SIZE
            name = f"probe {number}"
            found = cache.open(name, probe)
            check(whole <= found <= common, f"found {found} of {common} committed entries")
            check(cache.table(name)[0][: whole // PAGE_SIZE] == pages[: whole // PAGE_SIZE], "other pages hold it")
            cache.release(name)
        cache.release("a")
        check(cache.open("later", TEXT) >= 64, "a prefix is lost when its sequence ends, though pages are free")

    def test_commits_may_come_in_strides(self, make_cache: Callable[..., CacheManager], paged: Kinds) -> None:
        """Who holds `commit` back to multiples of `commit_stride` sees what a commit of each token gives."""
        each, held = make_cache(paged), make_cache(paged)
        stride = held.commit_stride
        check(isinstance(stride, int) and stride > 0, f"commit_stride is {stride!r}, must be a whole number above 0")
        for cache in (each, held):
            compute(cache, "a", TEXT[:20])
        for length in range(21, 70):
            for cache in (each, held):
                check(cache.reserve("a", length), f"no pages for {length} entries: {cache.stats()}")
            each.commit("a", TEXT[length - 1 : length], fence=length)
            if not length % stride:
                held.commit("a", TEXT[max(length - stride, 20) : length], fence=length)
            told = [
                (cache.stats(), [[page > 0 for page in pages] for pages in cache.table("a")]) for cache in (held, each)
            ]
            check(told[0] == told[1], f"at {length} entries: {told[0]}, with a commit of each {told[1]}")
            for cache in (each, held):
                cache.take_changes()
        for cache in (each, held):
            cache.release("a", fence=70)
            cache.retire(70)
        found = [cache.open("b", TEXT[:70]) for cache in (each, held)]
        check(found[0] == found[1], f"{found[1]} entries are found again, with a commit of each {found[0]}")

    def test_the_last_token_is_always_run(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        """Its logits are wanted, so one entry at least is left to compute."""
        cache = make_cache()
        compute(cache, "a", TEXT)
        for length in (1, 2, 16, 17, 32, 33, 48):
            found = cache.open(f"p{length}", TEXT[:length])
            check(found < length, f"all of {length} entries were found: nothing is left to run")

    def test_only_committed_entries_are_found(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        """Entries that were reserved or launched are not final: drafts may be rejected."""
        cache = make_cache()
        cache.open("a", TEXT)
        cache.reserve("a", 64)
        check(cache.open("b", TEXT) == 0, "entries were found that are only reserved")
        cache.commit("a", TEXT[:31])
        found = cache.open("c", TEXT)
        check(found <= 31, f"found {found} entries of 31 committed ones")
        cache.commit("a", TEXT[31:32])
        check(cache.open("d", TEXT) == 32, "a page that was committed in two parts is not found")

    def test_other_tokens_are_not_found(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        """An entry depends on all tokens before it, so an equal page after another beginning is another page."""
        cache = make_cache()
        compute(cache, "a", TEXT)
        for place in (0, 5, 16, 20, 40):
            probe = (*TEXT[:place], 7, *TEXT[place + 1 :])
            found = cache.open(f"p{place}", probe)
            check(found <= place, f"found {found} entries of a text that differs at {place}")
        check(cache.open("shifted", TEXT[16:]) == 0, "found a page that has other tokens before it")

    def test_salts_separate_tenants(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        cache = make_cache()
        compute(cache, "a", TEXT, salt="one")
        check(cache.open("b", TEXT, salt="two") == 0, "a prefix of another salt was found")
        check(cache.open("c", TEXT) == 0, "a prefix of a salt was found without one")
        check(cache.open("d", TEXT, salt="one") > 0, "a prefix of the same salt was not found")

    def test_reuse_can_be_declined(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        cache = make_cache()
        compute(cache, "a", TEXT)
        check(cache.open("b", TEXT, reuse=False) == 0, "entries were attached though reuse is off")
        check(cache.table("b") == ((),), "pages were attached though reuse is off")

    def test_reset_forgets_every_prefix(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        """Those of the ended, and those of who still runs: what it computed before the reset is not offered."""
        cache = make_cache()
        compute(cache, "gone", unlike(1))
        cache.release("gone")
        cache.open("a", TEXT)
        cache.reserve("a", 64)
        cache.commit("a", TEXT[:40])
        cache.reset_prefixes()
        check(cache.stats().cached == 0, "pages are still cached after reset_prefixes")
        check(cache.open("b", unlike(1)) == 0, "a prefix of before the reset was found")
        cache.commit("a", TEXT[40:64])
        check(cache.open("c", TEXT) == 0, "entries of before the reset were found")

    def test_cached_pages_make_room(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        """A reusable prefix never stands in the way of a sequence that runs, and what was evicted is not found."""
        cache = make_cache(pages=7)
        compute(cache, "a", TEXT[:64])
        cache.release("a")
        cache.open("b", unlike(1))
        check(cache.reserve("b", MAX_LENGTH), "cached pages were not handed out")
        cache.commit("b", unlike(1)[:MAX_LENGTH])
        check(cache.open("c", TEXT) <= PAGE_SIZE, "entries were found whose pages belong to somebody else")
        cache.check_integrity()

    def test_prefixes_are_counted(self, make_cache: Callable[..., CacheManager], finds: bool) -> None:
        cache = make_cache()
        asked = hits = 0
        for name, probe in (("a", TEXT), ("b", TEXT[:50]), ("c", unlike(1))):
            asked += len(probe)
            hits += compute(cache, name, probe)
            stats = cache.stats()
            counted = (stats.prefix_queries, stats.prefix_hits)
            check(counted == (asked, hits), f"prefix_queries, prefix_hits are {counted}, not {(asked, hits)}")

    # -- fences ------------------------------------------------------------------------------------------------------

    def test_pages_wait_for_their_fence(self, make_cache: Callable[..., CacheManager], kinds: Kinds) -> None:
        """A step that was launched may write after its sequence has ended: its pages are nobody's until it retires."""
        cache = make_cache(kinds, pages=7)
        cache.open("a", TEXT)
        cache.reserve("a", 80)
        mine = [set(table) for table in cache.table("a")]
        cache.release("a", fence=5)
        check(cache.stats().fenced == sum(map(len, mine)), f"the pages of a step in flight: {cache.stats()}")
        for step in range(1, 5):
            cache.retire(step)
        cache.open("b", unlike(1))
        check(not cache.reserve("b", MAX_LENGTH), "pages came back before step 5 retired")
        if cache.reserve("b", PAGE_SIZE):
            taken = [set(table) & pages for table, pages in zip(cache.table("b"), mine, strict=True)]
            check(not any(taken), f"pages {taken} came back before step 5 retired")
        cache.retire(5)
        check(cache.stats().fenced == 0, "pages are fenced by a step that has retired")
        check(cache.reserve("b", MAX_LENGTH), "pages did not come back when step 5 retired")

    def test_a_shared_page_waits_for_the_last_of_its_fences(self, make_cache: Callable[..., CacheManager]) -> None:
        cache = make_cache(pages=7)
        cache.open("a", TEXT)
        cache.reserve("a", 32)
        cache.fork("a", "b", 32)
        shared = set(cache.table("a")[0])
        cache.release("b", fence=9)
        check(cache.stats().held == 2, "pages that another names were let go")
        cache.release("a", fence=1)
        cache.retire(1)
        check(cache.stats().fenced == 2, f"step 9 may still write to pages {shared}: {cache.stats()}")
        cache.open("c", unlike(1))
        cache.reserve("c", 80)
        check(not shared & set(cache.table("c")[0]), "pages came back before step 9 retired")
        cache.retire(9)
        check(cache.stats().fenced == 0, "pages are fenced by a step that has retired")

    # -- windows -----------------------------------------------------------------------------------------------------

    def test_windows_let_go_of_what_nobody_sees(self, make_cache: Callable[..., CacheManager]) -> None:
        """Page 0 in its place, its pages free after the fence; a windowed cache holds any length."""
        cache = make_cache(("window",))
        cache.open("a", TEXT)
        cache.reserve("a", MAX_LENGTH)
        cache.commit("a", TEXT[:64], fence=2)
        table = cache.table("a")[0]
        dropped = (64 - WINDOW + 1) // PAGE_SIZE
        check(
            table[:dropped] == (0,) * dropped, f"a query at 64 sees {WINDOW} entries; pages {table[:dropped]} are kept"
        )
        check(cache.stats().fenced == dropped, "step 2 may still read what was dropped")
        cache.retire(2)
        check(cache.stats().fenced == 0, "what was dropped is fenced by a step that has retired")

    def test_windows_keep_what_is_seen(self, make_cache: Callable[..., CacheManager]) -> None:
        for committed in range(1, 65):
            cache = make_cache(("window",))
            cache.open("a", TEXT)
            cache.reserve("a", 64)
            cache.commit("a", TEXT[:committed])
            first = max(0, committed - WINDOW + 1) // PAGE_SIZE
            seen = cache.table("a")[0][first:]
            check(0 not in seen, f"a query at {committed} sees entries of a page that was dropped: {seen}")

    # -- the whole ---------------------------------------------------------------------------------------------------

    def test_stats_add_up(self, make_cache: Callable[..., CacheManager], kinds: Kinds) -> None:
        """`held` counts the pages that a table names, each once, and every page is in one place."""
        cache = make_cache(kinds)
        names: list[str] = []

        def count(after: str) -> None:
            stats = cache.stats()
            total = stats.free + stats.cached + stats.held + stats.fenced
            check(stats.total == total == sum(cache.pages) - len(kinds), f"after {after}: {stats}")
            named = {(g, page) for name in names for g, table in enumerate(cache.table(name)) for page in table if page}
            check(stats.held == len(named), f"after {after}: {stats.held} pages are held, tables name {len(named)}")
            cache.check_integrity()

        count("nothing")
        for name, tokens in (("a", TEXT), ("b", TEXT), ("c", unlike(1))):
            compute(cache, name, tokens[:50], fence=3)
            names.append(name)
            count("a sequence")
        cache.fork("a", "d", 50)
        names.append("d")
        count("a fork")
        for name in ("a", "c"):
            cache.release(name, fence=3)
            names.remove(name)
            count("a release")
        cache.retire(3)
        count("a retirement")

    def test_nothing_leaks(self, make_cache: Callable[..., CacheManager], kinds: Kinds) -> None:
        """After the last release every page is free, or cached, whatever was shared, copied, cut and dropped."""
        cache = make_cache(kinds)
        for turn in range(30):
            fence = 3 * turn + 1
            name, child = f"a{turn}", f"b{turn}"
            found = cache.open(name, TEXT if turn % 2 else unlike(turn))
            text = (TEXT if turn % 2 else unlike(turn))[found:50]
            check(cache.reserve(name, 50), f"turn {turn}: pages are lost: {cache.stats()}")
            cache.commit(name, text, fence)
            cache.fork(name, child, 50)
            cache.reserve(child, 55)
            if "state" not in kinds:
                cache.truncate(child, 52, fence)
            cache.take_changes()
            cache.release(name, fence + 1)
            cache.release(child, fence + 2)
            cache.retire(fence + 2)
            stats = cache.stats()
            check(stats.free + stats.cached == stats.total, f"turn {turn}: pages are lost: {stats}")
        cache.reset_prefixes()
        check(cache.stats().free == cache.stats().total, f"pages are lost: {cache.stats()}")
        cache.check_integrity()

    def test_the_same_calls_give_the_same_pages(self, make_cache: Callable[..., CacheManager], kinds: Kinds) -> None:
        """Several ranks run one manager each, and must agree: no set order, no clock, no chance."""

        def trace() -> list[Any]:
            cache, random = make_cache(kinds), Random(5)
            seen: list[Any] = []
            names: list[str] = []
            for step in range(1, 120):
                if len(names) < 4:
                    name, text = f"s{step}", TEXT if random.random() < 0.5 else unlike(step)
                    found = cache.open(name, text)
                    seen.append((found, cache.reserve(name, 60)))
                    names.append(name)
                    if seen[-1][1]:
                        cache.commit(name, text[found : 60 - random.randrange(3)], step)
                        cache.fork(name, f"f{step}", 60)
                        names.append(f"f{step}")
                        seen.append(cache.reserve(f"f{step}", 62))
                if random.random() < 0.6:
                    cache.release(names.pop(random.randrange(len(names))), step)
                cache.retire(step - 2)
                seen += [cache.take_changes(), cache.stats(), [cache.table(name) for name in names]]
            return seen

        check(trace() == trace(), "two managers that were called alike have other pages")

    @pytest.mark.parametrize("seed", range(8))
    def test_long_random_use(self, candidate: Candidate, paged: Kinds, seed: int) -> None:
        """Many sequences side by side: entries hold what their owner wrote, nothing comes back early or is lost."""
        from .cache_walk import CacheWalk

        candidate.require(make_need(paged, pages=8))
        for turn in range({"small": 1, "normal": 2, "full": 40}[self.grid]):
            CacheWalk(candidate.create, paged, self.prefix_unit, seed + 8 * turn).run(150)

    def test_random_use(self, candidate: Candidate) -> None:
        """Likewise with hypothesis, which says by how few calls a rule is broken."""
        pytest.importorskip("hypothesis")
        from .cache_machine import run_cache_machine

        kinds = [k for k in self.paged if not candidate.refusals(make_need(k, pages=6))]
        examples, steps = {"small": (15, 30), "normal": (60, 40), "full": (1000, 60)}[self.grid]
        run_cache_machine(candidate.create, kinds, self.prefix_unit, examples=examples, steps=steps)


# -- short forms -----------------------------------------------------------------------------------------------------


def unlike(number: int) -> tuple[int, ...]:
    """A text that begins like no other and like that of no other number."""
    return tuple(range(1000 * (number + 1), 1000 * (number + 1) + MAX_LENGTH))


def compute(cache: CacheManager, name: str, tokens: Sequence[int], *, salt: str = "", fence: int = 0) -> int:
    """Open a sequence and compute all of its tokens; what was found."""
    found = cache.open(name, tokens, salt=salt)
    check(cache.reserve(name, len(tokens)), f"no pages for {len(tokens)} entries: {cache.stats()}")
    cache.commit(name, tokens[found:], fence)
    return found


def snapshot(cache: CacheManager, *names: str) -> tuple[Any, ...]:
    return (cache.stats(), {name: cache.table(name) for name in names})


def unchanged(cache: CacheManager, before: tuple[Any, ...], after: str) -> None:
    stats, tables = before
    check(cache.stats() == stats, f"{after} changed the pages: {cache.stats()}, before {stats}")
    for name, table in tables.items():
        check(cache.table(name) == table, f"{after} changed the table of {name!r}")
    changes = cache.take_changes()
    told = [*changes.copies, *changes.moves, *changes.updates]
    check(not told, f"{after} gives the device something to learn: {told}")
    cache.check_integrity()
