"""Who names a page, and when it may be handed out again."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush


class Pages:
    """Pages 1 to `count`. Each is in one place: free, fenced (a step in flight may still write to it), or held."""

    def __init__(self, count: int) -> None:
        self.count = count
        #: Tables that name a page.
        self.names = [0] * (count + 1)
        #: Sequences that have left a page, and whose steps in flight may still write to it.
        self.pins = [0] * (count + 1)
        #: Heaps: pages, and (fence, page).
        self.free = list(range(1, count + 1))
        self.fenced: list[tuple[int, int]] = []
        self._fences = [0] * (count + 1)
        self._retired = 0
        heapify(self.free)

    def take(self) -> int:
        """The lowest free page, named once."""
        page = heappop(self.free)
        self.names[page] = 1
        self._fences[page] = 0
        return page

    def drop(self, page: int, fence: int) -> bool:
        """One name less; True: nothing keeps the page any more."""
        self.names[page] -= 1
        return self._settle(page, fence)

    def pin(self, page: int) -> None:
        """A name becomes a pin, until a fence is known."""
        self.names[page] -= 1
        self.pins[page] += 1

    def unpin(self, page: int, fence: int) -> None:
        self.pins[page] -= 1
        self._settle(page, fence)

    def retire(self, step: int) -> None:
        self._retired = max(self._retired, step)
        while self.fenced and self.fenced[0][0] <= self._retired:
            heappush(self.free, heappop(self.fenced)[1])

    def check(self, names: Mapping[int, int], pins: Mapping[int, int]) -> None:
        """AssertionError unless these are the names and pins, and every page is in one place."""
        places = [*self.free, *(page for _, page in self.fenced)]
        places += [page for page in range(1, self.count + 1) if self.names[page] or self.pins[page]]
        if sorted(places) != list(range(1, self.count + 1)):
            raise AssertionError(f"pages are in two places, or in none: {sorted(places)}")
        for page in range(1, self.count + 1):
            found = (self.names[page], self.pins[page])
            if found != (names.get(page, 0), pins.get(page, 0)):
                raise AssertionError(f"page {page} counts {found} names and pins, tables say otherwise")

    def _settle(self, page: int, fence: int) -> bool:
        self._fences[page] = max(self._fences[page], fence)
        if self.names[page] or self.pins[page]:
            return False
        if self._fences[page] > self._retired:
            heappush(self.fenced, (self._fences[page], page))
        else:
            heappush(self.free, page)
        return True
