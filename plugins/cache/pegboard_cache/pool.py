"""The pages of one cache group: reference counts, free, cached and fenced pages."""

from __future__ import annotations

from collections import OrderedDict

from .blocks import Block, PrefixIndex


class PagePool:
    """Every page but the null page is in exactly one place: free, cached (bound to a block and named by nobody, least
    recently used first), fenced (named by nobody, a launched step may still touch it), or held (refs > 0).

    Cached pages are evicted in the order they came. A sequence lets go of its last page first, and whoever holds a
    block holds its ancestors too, so descendants are always evicted before what they hang on."""

    def __init__(self, group: int, pages: int, index: PrefixIndex) -> None:
        self.total = pages - 1
        self.group = group
        self.refs = [0] * pages
        #: Highest fence under which a page was let go since it was handed out.
        self.fences = [0] * pages
        self.blocks: list[Block | None] = [None] * pages
        self.free = list(range(pages - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        #: Fence -> pages in the order they were let go.
        self.buckets: dict[int, dict[int, None]] = {}
        self.fenced = 0
        #: Page -> references that are only kept until a fence is known (see PagedCache.reserve).
        self.pins: dict[int, int] = {}
        self.retired = 0
        self._index = index

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def sharers(self, page: int) -> int:
        """Tables that name the page."""
        return self.refs[page] - self.pins.get(page, 0)

    def take(self) -> int:
        """A page for one holder; `available` must be positive. Evicts a cached one when none is free."""
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            self.unbind(page)
        self.refs[page] = 1
        self.fences[page] = 0
        return page

    def share(self, page: int) -> None:
        if self.refs[page] == 0:
            if page in self.cached:
                del self.cached[page]
            else:
                del self.buckets[self.fences[page]][page]
                self.fenced -= 1
        self.refs[page] += 1

    def drop(self, page: int, fence: int) -> bool:
        """Take one holder away; True: it was the last."""
        if fence > self.fences[page]:
            self.fences[page] = fence
        self.refs[page] -= 1
        if self.refs[page]:
            return False
        if self.fences[page] > self.retired:
            self.buckets.setdefault(self.fences[page], {})[page] = None
            self.fenced += 1
        else:
            self._rest(page)
        return True

    def pin(self, page: int) -> None:
        self.pins[page] = self.pins.get(page, 0) + 1

    def unpin(self, page: int, fence: int) -> bool:
        self.pins[page] -= 1
        if not self.pins[page]:
            del self.pins[page]
        return self.drop(page, fence)

    def _rest(self, page: int) -> None:
        if self.blocks[page] is None:
            self.free.append(page)
        else:
            self.cached[page] = None

    def retire(self, step: int) -> None:
        if step <= self.retired:
            return
        self.retired = step
        if self.fenced:
            for fence in sorted(fence for fence in self.buckets if fence <= step):
                pages = self.buckets.pop(fence)
                self.fenced -= len(pages)
                for page in pages:
                    self._rest(page)

    def bind(self, page: int, block: Block) -> None:
        """The page holds the block's entries from now on."""
        block.pages[self.group] = page
        block.links += 1
        self.blocks[page] = block

    def unbind(self, page: int) -> None:
        block = self.blocks[page]
        if block is not None:
            block.pages[self.group] = 0
            self.blocks[page] = None
            self._index.unlink(block)

    def touch(self, page: int) -> None:
        if page in self.cached:
            self.cached.move_to_end(page)

    def forget(self) -> None:
        """Unbind every page; cached ones become free."""
        for page, block in enumerate(self.blocks):
            if block is not None:
                self.unbind(page)
        self.free.extend(self.cached)
        self.cached.clear()

    def check(self, refs: dict[int, int]) -> None:
        """Raise AssertionError unless every page is in one place and `refs` are its references."""
        where = f"group {self.group}"
        places = dict.fromkeys(self.free, "free")
        waiting = [page for bucket in self.buckets.values() for page in bucket]
        if len(places) != len(self.free) or len(waiting) != self.fenced:
            raise AssertionError(f"{where}: a page is listed twice among free {self.free} or fenced {waiting}")
        held = [page for page in range(1, self.total + 1) if self.refs[page]]
        for name, pages in (("cached", list(self.cached)), ("fenced", waiting), ("held", held)):
            for page in pages:
                if page in places:
                    raise AssertionError(f"{where}: page {page} is both {places[page]} and {name}")
                places[page] = name
        if len(places) != self.total or 0 in places:
            lost = sorted(set(range(1, self.total + 1)) - set(places))
            raise AssertionError(f"{where}: pages {lost} are nowhere, or page 0 was handed out")
        for page in range(1, self.total + 1):
            if self.refs[page] != refs.get(page, 0):
                raise AssertionError(f"{where}: page {page} counts {self.refs[page]}, named by {refs.get(page, 0)}")
            block = self.blocks[page]
            if block is not None and (not block.indexed or block.pages[self.group] != page):
                raise AssertionError(f"{where}: page {page} is bound to a block that does not know it")
            if (places[page] == "cached" and block is None) or (places[page] == "free" and block is not None):
                raise AssertionError(f"{where}: page {page} is {places[page]}, bound to {block}")
