"""A line of sequences in the order of their keys."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from .sequence import Sequence

_KEY = attrgetter("key")


class Line:
    """Sorted by key, which never changes; insertion and removal search by bisection."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """First to last, over the line as it is now: it may change meanwhile."""
        return iter(self._sequences.copy())

    def __contains__(self, seq: Sequence) -> bool:
        place = bisect_left(self._sequences, seq.key, key=_KEY)
        return place < len(self._sequences) and self._sequences[place] is seq

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def insert(self, seq: Sequence) -> None:
        insort(self._sequences, seq, key=_KEY)

    def discard(self, seq: Sequence) -> None:
        place = bisect_left(self._sequences, seq.key, key=_KEY)
        if place < len(self._sequences) and self._sequences[place] is seq:
            del self._sequences[place]

    def backwards(self) -> Iterator[Sequence]:
        return reversed(self._sequences)
