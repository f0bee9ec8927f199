"""Random use of the cache against a model of what each page holds."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pegboard.contracts.attention import KVLayout
from pegboard.contracts.cache import CacheGroup, CacheNeed
from pegboard_cache.options import PagedOptions
from pegboard_cache.paged import PagedCache

SIZE = 16
FULL = int(os.environ.get("PEGBOARD_FULL", "0"))
LAYOUT = KVLayout(name="none", tensors=())


class Life:
    """One open sequence: the tokens whose entries were written, how many are committed, from where it may rewrite."""

    def __init__(self, salt, tokens, reuse):
        self.salt = salt
        self.tokens = tokens
        self.committed = self.floor = len(tokens)
        self.reserved = len(tokens)
        self.reuse = reuse
        self.fence = 0

    def entry(self, place):
        """What entry `place` must hold: all of its history."""
        return (self.salt, *self.tokens[: place + 1])


class CacheMachine(RuleBasedStateMachine):
    @initialize(kinds=st.sampled_from([("full",), ("window",), ("full", "window")]), pages=st.integers(6, 14))
    def start(self, kinds, pages):
        groups = tuple(
            CacheGroup(
                index=i, kind=kind, layers=(i,), layout=LAYOUT, window=20 if kind == "window" else None, page_bytes=1
            )
            for i, kind in enumerate(kinds)
        )
        need = CacheNeed(
            groups=groups, page_size=SIZE, budget_bytes=(pages + 1) * len(kinds), max_rows=8, max_length=96
        )
        self.groups = groups
        self.cache = PagedCache.create(need, PagedOptions())
        self.content = [[[None] * SIZE for _ in range(n)] for n in self.cache.pages]
        self.lives = {}
        self.names = 0
        self.launched = self.retired = 0
        self.named = {}  # step -> {(group, page, life)}

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.lives)))

    def learn(self):
        for copy in self.cache.take_changes().copies:
            self.content[copy.group][copy.target] = self.content[copy.group][copy.source].copy()

    def low(self, group, length):
        return 0 if group.window is None else max(0, length - group.window + 1)

    def check(self, name):
        life = self.lives[name]
        for g, (group, table) in enumerate(zip(self.groups, self.cache.table(name), strict=True)):
            for place in range(self.low(group, life.floor), len(life.tokens)):
                assert self.content[g][table[place // SIZE]][place % SIZE] == life.entry(place), (name, g, place)

    @rule(stem=st.sampled_from([1, 2]), length=st.integers(1, 60), salt=st.sampled_from(["", "t"]), reuse=st.booleans())
    def open(self, stem, length, salt, reuse):
        tokens = [stem] * 30 + [9] * 30
        name = f"s{self.names}"
        self.names += 1
        found = self.cache.open(name, tokens[:length], salt=salt, reuse=reuse)
        assert found % SIZE == 0
        assert found < length
        assert reuse or not found
        self.lives[name] = Life(salt, tokens[:found], reuse)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), back=st.integers(0, 5), count=st.integers(1, 40), more=st.integers(0, 5))
    def run_row(self, data, back, count, more):
        """Reserve, launch, write; `back` entries (drafts that were wrong) are written again, `more` only reserved."""
        name = self.pick(data)
        life = self.lives[name]
        start = max(life.floor, len(life.tokens) - back)
        stem = life.tokens[0] if life.tokens else data.draw(st.sampled_from([1, 2]))
        usual = [stem] * 30 + [9] * 60
        odd = data.draw(st.booleans())
        new = [7] * count if odd else usual[start : start + count]
        length = start + len(new) + more
        if not new or length > 90:
            return
        before = self.cache.stats()
        table = self.cache.table(name)
        if not self.cache.reserve(name, length):
            assert self.cache.stats() == before
            assert self.cache.table(name) == table
            return
        self.learn()
        life.reserved = max(life.reserved, length)
        life.tokens = life.tokens[:start] + new
        self.launched += 1
        life.fence = self.launched
        named = set()
        for g, table in enumerate(self.cache.table(name)):
            for place in range(start, start + len(new)):
                page = table[place // SIZE]
                assert page
                if place % SIZE == 0:
                    others = {
                        s for s, pages in self.named.items() for (h, p, n) in pages if (h, p) == (g, page) and n != name
                    }
                    assert not others, f"page {page} of group {g} came back before {others} retired"
                self.content[g][page][place % SIZE] = life.entry(place)
            named |= {(g, page, name) for page in table[self.low(self.groups[g], start) // SIZE :] if page}
        self.named[self.launched] = named

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), count=st.integers(1, 40))
    def commit(self, data, count):
        name = self.pick(data)
        life = self.lives[name]
        end = min(len(life.tokens), life.committed + count)
        self.cache.commit(name, life.tokens[life.committed : end], life.fence)
        life.committed = end
        life.floor = max(life.floor, end)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def truncate(self, data):
        name = self.pick(data)
        life = self.lives[name]
        self.cache.truncate(name, len(life.tokens), life.fence)
        life.reserved = len(life.tokens)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data, share):
        name = self.pick(data)
        life = self.lives[name]
        length = round(share * len(life.tokens))
        child = f"s{self.names}"
        self.names += 1
        table = self.cache.table(name)
        gone = any(
            not page
            for group, pages in zip(self.groups, table, strict=True)
            for page in pages[self.low(group, length) // SIZE : -(-length // SIZE)]
        ) or any(
            pages[: self.low(group, length) // SIZE + 1][-1:] == (0,)
            for group, pages in zip(self.groups, table, strict=True)
            if self.low(group, length) // SIZE < len(pages)
        )
        try:
            self.cache.fork(name, child, length)
        except ValueError:
            assert gone
            return
        assert not gone
        life.floor = max(life.floor, length)
        copy = Life(life.salt, life.tokens[:length], True)
        copy.committed = min(life.committed, length)
        copy.fence = life.fence
        self.lives[child] = copy

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def release(self, data):
        name = self.pick(data)
        self.cache.release(name, self.lives.pop(name).fence)

    @rule(count=st.integers(1, 3))
    def retire(self, count):
        self.retired = min(self.launched, self.retired + count)
        self.cache.retire(self.retired)
        self.named = {step: pages for step, pages in self.named.items() if step > self.retired}

    @rule()
    def reset(self):
        self.cache.reset_prefixes()
        assert self.cache.stats().cached == 0

    @invariant()
    def is_whole(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.total == stats.free + stats.cached + stats.held + stats.fenced
        self.learn()
        for name in self.lives:
            self.check(name)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for name in list(self.lives):
            self.cache.release(name, self.lives.pop(name).fence)
        self.cache.retire(self.launched)
        stats = self.cache.stats()
        assert stats.free + stats.cached == stats.total
        self.cache.reset_prefixes()
        assert self.cache.stats().free == stats.total
        self.cache.check_integrity()


CacheMachine.TestCase.settings = settings(
    max_examples=1000 if FULL else 60,
    stateful_step_count=60 if FULL else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCacheMachine = CacheMachine.TestCase
