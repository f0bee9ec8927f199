"""Rules of the paged cache, one by one. Page size 16 throughout."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pegboard.contracts.attention import KVLayout
from pegboard.contracts.cache import CacheGroup, CacheNeed, PageCopy, TableUpdate
from pegboard_cache import blocks
from pegboard_cache.options import PagedOptions
from pegboard_cache.paged import PagedCache

LAYOUT = KVLayout(name="none", tensors=())


def group(index=0, kind="full", window=None, page_bytes=1):
    return CacheGroup(index=index, kind=kind, layers=(index,), layout=LAYOUT, window=window, page_bytes=page_bytes)


def make_need(*groups, budget=100, **fields):
    defaults = {"page_size": 16, "max_rows": 4, "max_length": 64}
    return CacheNeed(groups=groups or (group(),), budget_bytes=budget, **defaults | fields)


def make_cache(*groups, pages=20, reuse=True, **fields):
    groups = groups or (group(),)
    budget = (pages + 1) * sum(g.page_bytes for g in groups)
    return PagedCache.create(make_need(*groups, budget=budget, **fields), PagedOptions(prefix_reuse=reuse))


def run(cache, seq, tokens, fence=0):
    """Open a sequence and compute all of its tokens; what was found in the cache."""
    found = cache.open(seq, tokens)
    assert cache.reserve(seq, len(tokens))
    cache.commit(seq, tokens[found:], fence)
    return found


TEXT = list(range(100, 164))


# -- refusals and sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "word"),
    [
        (make_need(page_size=8), "page_size"),
        (make_need(page_size=48), "page_size"),
        (make_need(group(kind="window")), "window"),
        (make_need(group(page_bytes=0)), "page_bytes"),
        (make_need(group(kind="state"), max_query=4), "recurrent"),
        (make_need(budget=4), "needs 5"),
        (make_need(group(3)), "numbered"),
    ],
)
def test_a_need_that_cannot_be_served_is_refused_with_its_reason(need, word):
    (reason,) = PagedCache.refusals(need, PagedOptions())
    assert word in reason


def test_the_least_budget_is_accepted_and_holds_one_longest_sequence():
    need = make_need(budget=5)
    assert PagedCache.refusals(need, PagedOptions()) == []
    cache = PagedCache.create(need, PagedOptions())
    assert cache.pages == (5,)
    assert cache.fits(64)
    assert not cache.fits(65)


def test_groups_get_the_same_pages_until_one_has_all_it_can_use():
    # A window of 16 needs at most 4 rows * (1 + 2) + 4 pages; the rest of the budget goes to the full group.
    full, window = group(page_bytes=10), group(1, "window", 16, page_bytes=5)
    assert PagedCache.create(make_need(full, window, budget=15 * 11), PagedOptions()).pages == (11, 11)
    pages = PagedCache.create(make_need(full, window, budget=1000), PagedOptions()).pages
    assert pages == (1 + (1000 - 17 * 5 - 10) // 10, 17)


def test_state_groups_need_two_pages_a_row():
    assert make_cache(group(), group(1, "state"), pages=50).pages[1] == 9


def test_unknown_options_are_refused():
    with pytest.raises(ValidationError):
        PagedOptions(prefix=True)


# -- prefix reuse ----------------------------------------------------------------------------------------------------


def test_whole_committed_pages_are_found_and_the_last_token_is_always_run():
    cache = make_cache()
    assert run(cache, "a", TEXT) == 0
    assert cache.open("b", TEXT) == 48
    assert cache.open("c", TEXT[:33]) == 32
    assert cache.open("d", TEXT[:32]) == 16
    assert cache.open("e", [*TEXT[:20], 1, *TEXT[21:]]) == 16
    assert cache.open("f", [1, *TEXT[1:]]) == 0
    assert [page for (page, *_) in (cache.table("b")[0], cache.table("c")[0])] == [cache.table("a")[0][0]] * 2
    stats = cache.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (64 * 4 + 33 + 32, 48 + 32 + 16 + 16)


def test_only_committed_entries_are_found():
    cache = make_cache()
    cache.open("a", TEXT)
    cache.reserve("a", 64)
    cache.commit("a", TEXT[:31])
    assert cache.open("b", TEXT) == 16
    cache.commit("a", TEXT[31:32])
    assert cache.open("c", TEXT) == 32


def test_prefixes_outlive_their_sequence_until_reset():
    cache = make_cache()
    run(cache, "a", TEXT)
    cache.release("a")
    assert cache.stats().cached == 4
    assert cache.open("b", TEXT) == 48
    cache.release("b")
    cache.reset_prefixes()
    assert cache.stats().free == cache.stats().total
    assert cache.open("c", TEXT) == 0


def test_after_a_reset_open_sequences_offer_nothing():
    cache = make_cache()
    cache.open("a", TEXT)
    cache.reserve("a", 64)
    cache.commit("a", TEXT[:40])
    cache.reset_prefixes()
    cache.commit("a", TEXT[40:])
    assert cache.open("b", TEXT) == 0
    cache.release("a")
    assert cache.stats().free == cache.stats().total
    cache.check_integrity()


def test_salts_do_not_share():
    cache = make_cache()
    cache.open("a", TEXT, salt="one")
    cache.reserve("a", 64)
    cache.commit("a", TEXT)
    assert cache.open("b", TEXT, salt="two") == 0
    assert cache.open("c", TEXT) == 0
    assert cache.open("d", TEXT, salt="one") == 48


def test_no_reuse_on_request_and_by_option():
    cache = make_cache()
    run(cache, "a", TEXT)
    assert cache.open("b", TEXT, reuse=False) == 0
    off = make_cache(reuse=False)
    run(off, "a", TEXT)
    assert off.open("b", TEXT) == 0
    off.release("a")
    assert off.stats().free == off.stats().total


def test_equal_hashes_of_other_tokens_are_told_apart(monkeypatch):
    # The worst hash: one value for all blocks at the same depth.
    monkeypatch.setattr(blocks, "digest_of", lambda parent, tokens: parent + b"x")
    cache = make_cache()
    run(cache, "a", TEXT)
    assert cache.open("b", [7] * 64) == 0
    assert cache.reserve("b", 64)
    cache.commit("b", [7] * 64)
    assert cache.open("c", [7] * 16 + TEXT[16:]) == 0, "a right second page after a wrong first one"
    assert cache.open("d", TEXT) == 48
    for seq in "abcd":
        cache.release(seq)
    cache.check_integrity()


def test_the_least_recently_used_prefix_is_evicted_and_leaves_before_parents():
    cache = make_cache(pages=8)
    one, two = TEXT, [t + 1000 for t in TEXT]
    run(cache, "one", one)
    run(cache, "two", two)
    cache.release("one")
    cache.release("two")
    assert cache.stats().cached == 8
    cache.open("x", [1])
    assert cache.reserve("x", 32)
    assert cache.open("probe one", [*one, 1]) == 32, "the last two pages of the older prefix went first"
    assert cache.open("probe two", [*two, 1]) == 64


def test_a_prefix_computed_twice_is_kept_as_long_as_what_hangs_on_it():
    cache = make_cache(pages=9)
    for seq in "ab":  # side by side: neither finds the other's pages
        cache.open(seq, TEXT)
    for seq in "ab":
        cache.reserve(seq, 32)
    cache.commit("a", TEXT[:16])
    cache.commit("b", TEXT[:32])
    cache.release("a")
    run(cache, "other", [5] * 48)
    cache.release("b")
    cache.release("other")
    # b's second page hangs on a's first, which is older; it must not go before it.
    free = cache.stats().free
    cache.open("x", [1])
    assert cache.reserve("x", 16 * (free + 1))
    assert cache.open("probe", TEXT) == 16


# -- reserve, commit, truncate ---------------------------------------------------------------------------------------


def test_page_zero_is_never_handed_out():
    cache = make_cache(pages=4)
    cache.open("a", TEXT)
    assert cache.reserve("a", 64)
    assert sorted(cache.table("a")[0]) == [1, 2, 3, 4]


def test_a_reserve_without_pages_changes_nothing_in_any_group():
    cache = make_cache(group(), group(1, "window", 16), pages=4)
    cache.open("a", TEXT)
    assert cache.reserve("a", 40)
    cache.open("b", TEXT)
    before = (cache.stats(), cache.table("a"))
    assert not cache.reserve("b", 20)
    assert (cache.stats(), cache.table("a")) == before
    assert cache.table("b") == ((), ())
    assert cache.reserve("b", 16)


def test_changes_name_new_pages_once():
    cache = make_cache()
    cache.open("a", TEXT)
    cache.reserve("a", 17)
    pages = cache.table("a")[0]
    assert cache.take_changes().updates == (TableUpdate(seq="a", group=0, start=0, pages=pages),)
    assert cache.take_changes().updates == ()
    cache.reserve("a", 33)
    (update,) = cache.take_changes().updates
    assert (update.start, update.pages) == (2, cache.table("a")[0][2:])
    cache.reserve("a", 49)
    cache.release("a")
    assert cache.take_changes().updates == ()


def test_truncate_gives_back_what_lies_beyond():
    cache = make_cache()
    cache.open("a", TEXT)
    cache.reserve("a", 64)
    cache.commit("a", TEXT[:10])
    cache.truncate("a", 17, fence=3)
    assert (cache.stats().held, cache.stats().fenced) == (2, 2)
    cache.retire(3)
    assert cache.stats().fenced == 0
    assert cache.reserve("a", 40)


@pytest.mark.parametrize("call", ["reserve", "commit", "truncate", "release", "table"])
def test_sequences_that_are_not_open_are_key_errors(call):
    arguments = {"reserve": (1,), "commit": ([1],), "truncate": (0,)}.get(call, ())
    with pytest.raises(KeyError):
        getattr(make_cache(), call)("nobody", *arguments)


def test_wrong_lengths_are_value_errors_and_change_nothing():
    cache = make_cache()
    cache.open("a", TEXT)
    cache.reserve("a", 20)
    cache.commit("a", TEXT[:18])
    before = cache.stats()
    for call in (
        lambda: cache.open("a", TEXT),
        lambda: cache.commit("a", TEXT[18:21]),
        lambda: cache.truncate("a", 17),
        lambda: cache.truncate("a", 21),
        lambda: cache.reserve("a", 17),
        lambda: cache.fork("a", "b", 21),
        lambda: cache.fork("a", "a", 2),
    ):
        with pytest.raises(ValueError, match="'a'"):
            call()
    assert cache.stats() == before
    with pytest.raises(KeyError):
        cache.table("b")


# -- fences ----------------------------------------------------------------------------------------------------------


def test_pages_wait_for_their_fence():
    cache = make_cache(pages=4)
    cache.open("a", TEXT)
    cache.reserve("a", 64)
    cache.release("a", fence=2)
    cache.open("b", TEXT)
    assert cache.stats().fenced == 4
    cache.retire(1)
    assert not cache.reserve("b", 1)
    cache.retire(2)
    assert cache.reserve("b", 64)


def test_a_shared_page_waits_for_the_latest_of_its_fences():
    cache = make_cache(pages=4)
    run(cache, "a", TEXT)
    cache.open("b", TEXT)
    cache.release("b", fence=9)
    cache.release("a", fence=1)
    cache.retire(1)
    assert (cache.stats().fenced, cache.stats().cached) == (3, 1)
    cache.retire(9)
    assert (cache.stats().fenced, cache.stats().cached) == (0, 4)


def test_a_fenced_prefix_can_be_taken_up_again_and_keeps_its_fence():
    cache = make_cache()
    run(cache, "a", TEXT)
    cache.release("a", fence=5)
    assert cache.open("b", TEXT) == 48
    assert cache.stats().fenced == 1
    cache.release("b")
    assert cache.stats().fenced == 4
    cache.retire(5)
    assert cache.stats().cached == 4
    cache.check_integrity()


# -- forks -----------------------------------------------------------------------------------------------------------


def forked(length=20, **fields):
    cache = make_cache(**fields)
    run(cache, "parent", TEXT[:30])
    cache.fork("parent", "child", length)
    cache.take_changes()
    return cache


def test_a_fork_shares_pages_until_one_of_the_two_writes():
    cache = forked()
    assert cache.table("child") == cache.table("parent")
    old = cache.table("parent")[0]
    assert cache.reserve("child", 21)
    new = cache.table("child")[0]
    assert new[0] == old[0]
    assert new[1] != old[1]
    changes = cache.take_changes()
    assert changes.copies == (PageCopy(group=0, source=old[1], target=new[1]),)
    assert changes.updates == (TableUpdate(seq="child", group=0, start=1, pages=new[1:]),)
    assert cache.reserve("parent", 31)
    assert cache.table("parent")[0] == old, "the page is the parent's own again"
    assert cache.take_changes().copies == ()


def test_the_parent_copies_too_when_it_writes_first():
    cache = make_cache()
    cache.open("parent", TEXT)
    cache.reserve("parent", 20)  # launched, nothing committed
    cache.fork("parent", "child", 20)
    old = cache.table("parent")[0]
    assert cache.reserve("parent", 21)
    assert cache.table("parent")[0][1] != old[1]
    assert cache.reserve("child", 21)
    assert cache.table("child")[0] == old


def test_a_page_that_was_copied_away_from_waits_for_the_steps_of_both():
    cache = make_cache()
    cache.open("parent", TEXT)
    cache.reserve("parent", 20)
    cache.fork("parent", "child", 20)
    cache.reserve("parent", 21)
    cache.release("child", fence=1)
    cache.retire(1)
    held = cache.stats().held
    cache.commit("parent", TEXT[:20], fence=4)
    assert (cache.stats().held, cache.stats().fenced) == (held - 1, 1)
    cache.release("parent", fence=4)
    cache.retire(4)
    cache.check_integrity()


def test_a_whole_page_is_not_copied():
    cache = forked(length=16)
    assert cache.reserve("child", 17)
    assert cache.take_changes().copies == ()


def test_a_reusable_page_is_withdrawn_before_its_last_holder_writes_it():
    cache = make_cache()
    run(cache, "parent", TEXT[:32])
    cache.fork("parent", "child", 20)
    cache.release("parent")
    assert cache.reserve("child", 32)
    assert cache.take_changes().copies == ()
    cache.commit("child", [7] * 12)
    assert cache.open("probe", TEXT) == 16, "the second page holds other tokens now"
    assert cache.open("probe 2", [*TEXT[:20], *[7] * 12, 1]) == 32


def test_a_copy_needs_a_page():
    cache = forked(pages=4)
    cache.open("x", [1])
    cache.reserve("x", 32)
    assert not cache.reserve("child", 21)
    cache.release("x")
    assert cache.reserve("child", 21)


def test_forks_of_flying_entries_commit_what_the_parent_had_not():
    cache = make_cache()
    cache.open("parent", TEXT)
    cache.reserve("parent", 40)
    cache.commit("parent", TEXT[:20])
    cache.fork("parent", "child", 39)
    assert cache.reserve("child", 40)
    cache.commit("child", TEXT[20:40])
    assert cache.open("probe", TEXT) == 32


def test_a_fork_inside_committed_pages_keeps_their_tokens():
    cache = make_cache()
    run(cache, "parent", TEXT[:40])
    cache.fork("parent", "child", 20)
    cache.reserve("child", 32)
    cache.commit("child", [7] * 12)
    assert cache.open("probe", [*TEXT[:20], *[7] * 12, 1]) == 32


def test_a_copy_for_a_sequence_that_ended_is_left_out_unless_a_fork_needs_it():
    cache = forked()
    cache.reserve("child", 21)
    cache.release("child")
    assert cache.take_changes().copies == ()
    cache = forked()
    cache.reserve("child", 21)
    cache.fork("child", "grandchild", 21)
    cache.release("child")
    (copy,) = cache.take_changes().copies
    assert copy.target == cache.table("grandchild")[0][1]


# -- windows and states ----------------------------------------------------------------------------------------------


def test_a_window_drops_pages_that_no_later_query_sees():
    cache = make_cache(group(kind="window", window=16))
    cache.open("a", TEXT)
    cache.reserve("a", 64)
    cache.commit("a", TEXT[:30])
    assert 0 not in cache.table("a")[0], "a query at 30 sees entry 15"
    cache.commit("a", TEXT[30:31], fence=2)
    assert [page == 0 for page in cache.table("a")[0]] == [True, False, False, False]
    assert cache.stats().fenced == 1
    cache.commit("a", TEXT[31:47], fence=2)
    assert [page == 0 for page in cache.table("a")[0]] == [True, True, False, False]


def test_a_prefix_needs_all_pages_of_full_groups_and_the_window_of_the_others():
    cache = make_cache(group(), group(1, "window", 16), pages=12)
    run(cache, "a", TEXT)
    assert cache.open("b", [*TEXT, 1]) == 64
    full, window = cache.table("b")
    assert 0 not in full
    assert window[:3] == (0, 0, 0)
    assert window[3] == cache.table("a")[1][3]


@pytest.mark.parametrize(("taken", "found"), [(2, 48), (3, 48), (4, 0)])
def test_a_prefix_is_shortened_to_where_a_window_is_whole(taken, found):
    cache = make_cache(group(kind="window", window=32), pages=6)
    cache.open("a", TEXT)
    for end in (16, 32, 48, 64):
        cache.reserve("a", end)
        cache.commit("a", TEXT[end - 16 : end])
    cache.release("a")
    # Two pages are free; pages 0 and 1, which left the window first, are evicted next. A query at 48 sees 1 and 2.
    cache.open("x", [1])
    assert cache.reserve("x", 16 * taken)
    assert cache.open("b", TEXT) == found
    assert cache.open("c", [*TEXT, 1]) == 64, "a query at 64 sees pages 2 and 3"
    cache.check_integrity()


def test_a_fork_behind_the_window_is_refused():
    cache = make_cache(group(kind="window", window=16))
    run(cache, "a", TEXT)
    with pytest.raises(ValueError, match="dropped"):
        cache.fork("a", "b", 20)
    cache.fork("a", "b", 63)
    cache.check_integrity()


def test_states_have_one_page_copied_at_the_fork_and_no_prefixes():
    cache = make_cache(group(), group(1, "state"))
    assert run(cache, "a", TEXT) == 0
    assert len(cache.table("a")[1]) == 1
    assert cache.open("b", TEXT) == 0
    with pytest.raises(ValueError, match="state"):
        cache.fork("a", "c", 60)
    cache.fork("a", "c", 64)
    copy = next(copy for copy in cache.take_changes().copies if copy.group == 1)
    assert (copy.source, copy.target) == (cache.table("a")[1][0], cache.table("c")[1][0])
    for seq in "abc":
        cache.release(seq)
    assert cache.stats().free == cache.stats().total
