"""A cache manager in use: what each page of a device would hold, and the contract's rules held against every call."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.contracts.attention import KVLayout
from pegboard.contracts.cache import CacheGroup, CacheManager, CacheNeed

from .conformance import check

PAGE_SIZE = 16
#: Entries that a query of a windowed group sees: more than a page, and no multiple of one.
WINDOW = 20
LAYOUT = KVLayout(name="none", tensors=())


def make_need(
    kinds: Sequence[str] = ("full",),
    *,
    pages: int = 20,
    window: int = WINDOW,
    max_rows: int = 8,
    max_length: int = 96,
    max_query: int = 1,
) -> CacheNeed:
    """A group for each of `kinds`, a byte a page, with a budget of `pages` pages a group beside the null pages."""
    groups = tuple(
        CacheGroup(
            index=index,
            kind=kind,  # type: ignore[arg-type]  # "full", "window" or "state"
            layers=(index,),
            layout=LAYOUT,
            window=window if kind == "window" else None,
            page_bytes=1,
        )
        for index, kind in enumerate(kinds)
    )
    return CacheNeed(
        groups=groups,
        page_size=PAGE_SIZE,
        budget_bytes=(pages + 1) * len(groups),
        max_rows=max_rows,
        max_length=max_length,
        max_query=max_query,
    )


class Life:
    """One open sequence: the tokens whose entries were written, how many are committed, from where it may rewrite."""

    def __init__(self, salt: str, tokens: Sequence[int]) -> None:
        self.salt = salt
        self.tokens = list(tokens)
        self.committed = self.floor = self.reserved = len(tokens)
        self.fence = 0
        #: Its first entries were computed before the prefixes were reset: it offers none any more.
        self.outdated = False

    def entry(self, place: int) -> tuple[object, ...]:
        """What entry `place` must hold: all of its history."""
        return (self.salt, *self.tokens[: place + 1])


class CacheUse:
    """Calls a manager as a scheduler does and does what a device would with its pages. AssertionError: a rule of the
    contract is broken. Groups of kind "full" and "window" only."""

    def __init__(self, cache: CacheManager, need: CacheNeed, prefix_unit: int = 1) -> None:
        """`prefix_unit`: prefixes are found in multiples of so many entries."""
        self.cache = cache
        self.groups = need.groups
        self.unit = prefix_unit
        self.lives: dict[str, Life] = {}
        self.launched = self.retired = 0
        #: Group -> page -> offset -> what was written last.
        self._content: list[list[list[object]]] = [[[None] * PAGE_SIZE for _ in range(n)] for n in cache.pages]
        #: (sequence, group) -> the table as the device was told.
        self._tables: dict[tuple[str, int], list[int]] = {}
        #: Step in flight -> (group, page, sequence) that it may touch.
        self._named: dict[int, set[tuple[int, int, str]]] = {}
        #: (salt, tokens) of what was committed and may be found.
        self._final: list[tuple[str, list[int]]] = []

    def low(self, group: CacheGroup, length: int) -> int:
        """The first entry that a query at `length` sees."""
        return 0 if group.window is None else max(0, length - group.window + 1)

    # -- calls -------------------------------------------------------------------------------------------------------

    def open(self, name: str, tokens: Sequence[int], *, salt: str = "", reuse: bool = True) -> int:
        found = self.cache.open(name, tokens, salt=salt, reuse=reuse)
        check(0 <= found < max(len(tokens), 1), f"open found {found} of {len(tokens)} entries; the last must be run")
        check(found % self.unit == 0, f"open found {found} entries, no multiple of {self.unit}")
        check(reuse or not found, "open found entries though reuse is off")
        prefix = list(tokens[:found])
        known = not found or any(s == salt and final[:found] == prefix for s, final in self._final)
        check(known, f"open found {found} entries that nobody has committed under the salt {salt!r}")
        self.lives[name] = Life(salt, prefix)
        return found

    def run_row(self, name: str, new: Sequence[int], *, back: int = 0, more: int = 0) -> bool:
        """Reserve, launch and write the entries of `new`; `back` entries (drafts that were wrong) are written again,
        `more` are only reserved. False: there were no pages, and nothing has changed."""
        life = self.lives[name]
        start = max(life.floor, len(life.tokens) - back)
        length = start + len(new) + more
        before, table = self.cache.stats(), self.cache.table(name)
        if not self.cache.reserve(name, length):
            check(self.cache.stats() == before, "reserve returned False and changed the pages")
            check(self.cache.table(name) == table, "reserve returned False and changed the table")
            return False
        self.learn()
        life.reserved = max(life.reserved, length)
        life.tokens = [*life.tokens[:start], *new]
        self.launched += 1
        life.fence = self.launched
        named: set[tuple[int, int, str]] = set()
        for g, pages in enumerate(self.cache.table(name)):
            for place in range(start, start + len(new)):
                page = pages[place // PAGE_SIZE]
                check(page > 0, f"{name!r}: no page for entry {place} of group {g} after it was reserved")
                if place % PAGE_SIZE == 0:
                    self._check_new(g, page, name)
                self._content[g][page][place % PAGE_SIZE] = life.entry(place)
            seen = pages[self.low(self.groups[g], start) // PAGE_SIZE :]
            named |= {(g, page, name) for page in seen if page}
        self._named[self.launched] = named
        return True

    def _check_new(self, g: int, page: int, name: str) -> None:
        """A page that begins a new life must not be named by somebody else's step that still flies."""
        for step, pages in self._named.items():
            others = {n for group, p, n in pages if (group, p) == (g, page) and n != name}
            check(not others, f"page {page} of group {g} came back while step {step} names it for {sorted(others)}")

    def commit(self, name: str, count: int) -> None:
        """Commit the next `count` entries, or as many as were written."""
        life = self.lives[name]
        end = min(len(life.tokens), life.committed + count)
        self.cache.commit(name, life.tokens[life.committed : end], life.fence)
        life.committed = end
        life.floor = max(life.floor, end)
        if not life.outdated:
            self._final.append((life.salt, life.tokens[:end]))

    def truncate(self, name: str) -> None:
        """Give back what lies beyond the written entries."""
        life = self.lives[name]
        self.cache.truncate(name, len(life.tokens), life.fence)
        life.reserved = len(life.tokens)

    def fork(self, name: str, child: str, length: int) -> bool:
        """False: refused, and rightly so, since a windowed group has dropped what the child would see."""
        life = self.lives[name]
        gone = self._dropped(name, length)
        try:
            self.cache.fork(name, child, length)
        except ValueError as error:
            check(gone, f"fork of {name!r} at {length} of {len(life.tokens)} was refused: {error}")
            return False
        check(not gone, f"fork of {name!r} at {length}: a windowed group has dropped entries that the child would see")
        life.floor = max(life.floor, length)
        copy = Life(life.salt, life.tokens[:length])
        copy.committed = min(life.committed, length)
        copy.fence, copy.outdated = life.fence, life.outdated
        self.lives[child] = copy
        return True

    def _dropped(self, name: str, length: int) -> bool:
        """Whether a page is gone that a query at `length` would see."""
        for group, pages in zip(self.groups, self.cache.table(name), strict=True):
            first = self.low(group, length) // PAGE_SIZE
            last = max(-(-length // PAGE_SIZE), first + 1)
            if 0 in pages[first:last]:
                return True
        return False

    def release(self, name: str) -> None:
        self.cache.release(name, self.lives.pop(name).fence)

    def retire(self, count: int) -> None:
        self.retired = min(self.launched, self.retired + count)
        self.cache.retire(self.retired)
        self._named = {step: pages for step, pages in self._named.items() if step > self.retired}

    def reset(self) -> None:
        self.cache.reset_prefixes()
        check(self.cache.stats().cached == 0, "prefixes are still cached after reset_prefixes")
        self._final.clear()
        for life in self.lives.values():
            life.outdated = bool(life.committed) or life.outdated

    # -- rules -------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Do the copies and note the tables, as the device does before a step."""
        changes = self.cache.take_changes()
        for copy in changes.copies:
            self._content[copy.group][copy.target] = self._content[copy.group][copy.source].copy()
        for update in changes.updates:
            check(update.seq in self.lives, f"take_changes mentions {update.seq!r}, which was released")
            table = self._tables.setdefault((update.seq, update.group), [])
            check(update.start <= len(table), f"{update.seq!r}: the device knows no page before {update.start}")
            table[update.start : update.start + len(update.pages)] = update.pages
        for name in self.lives:
            for g, pages in enumerate(self.cache.table(name)):
                told = self._tables.get((name, g), [])
                untold = [i for i, page in enumerate(pages) if page and (i >= len(told) or told[i] != page)]
                check(not untold, f"{name!r}: the device was not told of pages {untold} of group {g}")

    def check(self) -> None:
        """Pages hold what their owners wrote, the numbers add up, and the manager's own check passes."""
        self.cache.check_integrity()
        stats = self.cache.stats()
        total = stats.free + stats.cached + stats.held + stats.fenced
        check(stats.total == total, f"free, cached, held and fenced pages are {total} of {stats.total}")
        self.learn()
        for name, life in self.lives.items():
            for g, (group, table) in enumerate(zip(self.groups, self.cache.table(name), strict=True)):
                for place in range(self.low(group, life.floor), len(life.tokens)):
                    held = self._content[g][table[place // PAGE_SIZE]][place % PAGE_SIZE]
                    check(held == life.entry(place), f"{name!r}: entry {place} of group {g} holds something else")

    def finish(self) -> None:
        """Release everybody: nothing may be left."""
        for name in list(self.lives):
            self.release(name)
        self.retire(self.launched)
        stats = self.cache.stats()
        check(stats.free + stats.cached == stats.total, f"pages are lost when every sequence has ended: {stats}")
        self.cache.reset_prefixes()
        stats = self.cache.stats()
        check(stats.free == stats.total, f"pages are lost when every prefix is forgotten: {stats}")
        self.cache.check_integrity()
