"""Stop strings: matched on text, across pieces, and never shown and then taken back."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.errors import InvalidRequest


class StopMatcher:
    """Lets text through up to the leftmost stop string; at the same place the shortest counts. Only the longest tail
    that could still begin a stop string is held back.

    A stop string counts if its last character came in a piece that was `armed` (min_tokens is over); its beginning
    may have come before. A match is not final while a stop string that began further left may still complete.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidRequest(f"stop must be a list of strings, none of them empty; got {stops!r}")
        self._stops = tuple(sorted(dict.fromkeys(stops), key=len))
        self._include = include_stop
        self._held = ""
        #: (start in the held text, stop string): complete, but one further left may still come.
        self._found: tuple[int, str] | None = None
        #: The stop string that ended the text.
        self.matched: str | None = None

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """(text to show, whether a stop string ended it). After that nothing more is shown."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        arrived = len(self._held)
        self._held += text
        if armed:
            self._search(arrived)
        tail = self._tail()
        if self._found is not None and self._found[0] <= tail:
            return self._end(), True
        shown, self._held = self._held[:tail], self._held[tail:]
        if self._found is not None:
            self._found = (self._found[0] - tail, self._found[1])
        return shown, False

    def finish(self) -> str:
        """The rest of the text, when no more will come; `matched` tells if it ends with a stop string after all."""
        if self._found is not None:
            return self._end()
        shown, self._held = self._held, ""
        return shown

    def _search(self, arrived: int) -> None:
        """The leftmost stop string that ends beyond the first `arrived` characters."""
        for stop in self._stops:
            start = self._held.find(stop, max(0, arrived - len(stop) + 1))
            if start >= 0 and (self._found is None or start < self._found[0]):
                self._found = (start, stop)

    def _tail(self) -> int:
        """Where the longest tail begins that is the beginning of a stop string, and not all of it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return len(self._held) - longest

    def _end(self) -> str:
        if self._found is None:
            return ""
        start, self.matched = self._found
        shown = self._held[: start + len(self.matched)] if self._include else self._held[:start]
        self._held = ""
        self._found = None
        return shown
