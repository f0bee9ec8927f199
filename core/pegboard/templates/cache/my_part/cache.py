"""Pages for sequences, without a prefix cache. All groups keep every entry, so one table serves them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

from pegboard.contracts.cache import CacheChanges, CacheManager, CacheNeed, CacheStats, PageCopy, TableUpdate

from .options import Options
from .pages import Pages


class Held:
    """One open sequence. committed <= floor <= reserved; entries below `floor` are never written again."""

    def __init__(self, table: list[int], committed: int, length: int) -> None:
        self.table = table
        self.committed = committed
        self.floor = self.reserved = length
        #: First place of the table that the device doesn't know; None: it knows all.
        self.untold: int | None = 0 if table else None
        #: Pages that were copied and left; steps in flight may still write to them for this sequence.
        self.left: list[int] = []


class MyPart(CacheManager):
    """The lowest free page goes first, so that a part of the memory that is never needed is never touched."""

    def __init__(self, need: CacheNeed, options: Options) -> None:
        self._size = need.page_size
        self._groups = range(len(need.groups))
        self._pages = Pages(_count(need, options))
        self._held: dict[str, Held] = {}
        #: Page -> the page that its content comes from.
        self._copies: dict[int, int] = {}

    @classmethod
    def refusals(cls, need: CacheNeed, options: Options) -> Sequence[str]:
        reasons = [
            f"keeps every entry; group {group.index} is of kind {group.kind}"
            for group in need.groups
            if group.kind != "full"
        ]
        count, longest = _count(need, options), -(-need.max_length // need.page_size)
        if count < longest:
            reasons.append(
                f"{max(count, 0)} pages of {need.page_size} entries don't hold one sequence of {need.max_length}: "
                "raise kv_memory or max_pages, or lower max_length"
            )
        return reasons

    @classmethod
    def create(cls, need: CacheNeed, options: Options) -> Self:
        return cls(need, options)

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self._pages.count + 1 for _ in self._groups)

    def fits(self, length: int) -> bool:
        return -(-length // self._size) <= self._pages.count

    def open(self, seq: str, tokens: Sequence[int], *, salt: str = "", reuse: bool = True) -> int:
        self._refuse_open(seq)
        self._held[seq] = Held([], 0, 0)
        return 0

    def reserve(self, seq: str, length: int) -> bool:
        held = self._held[seq]
        if length < held.floor:
            raise ValueError(f"sequence {seq!r}: {length} entries asked for, {held.floor} are final already")
        table, tail = held.table, held.floor // self._size
        more = max(0, -(-length // self._size) - len(table))
        copy = length > held.floor and tail < len(table) and self._pages.names[table[tail]] > 1
        if more + copy > len(self._pages.free):
            return False
        if copy:
            old, table[tail] = table[tail], self._pages.take()
            self._copies[table[tail]] = old
            self._pages.pin(old)
            held.left.append(old)
            _mark(held, tail)
        if more:
            _mark(held, len(table))
            table.extend(self._pages.take() for _ in range(more))
        held.reserved = max(held.reserved, length)
        return True

    def commit(self, seq: str, tokens: Sequence[int], fence: int = 0) -> None:
        held = self._held[seq]
        committed = held.committed + len(tokens)
        if committed > held.reserved:
            raise ValueError(f"sequence {seq!r}: {committed} entries committed, {held.reserved} were reserved")
        held.committed = committed
        held.floor = max(held.floor, committed)
        self._leave(held, fence)

    def truncate(self, seq: str, length: int, fence: int = 0) -> None:
        held = self._held[seq]
        if not held.floor <= length <= held.reserved:
            raise ValueError(f"sequence {seq!r}: cut to {length}; {held.floor} to {held.reserved} is right")
        kept = -(-length // self._size)
        self._drop(held.table[kept:], fence)
        del held.table[kept:]
        if held.untold is not None and held.untold >= kept:
            held.untold = None
        held.reserved = length
        self._leave(held, fence)

    def fork(self, parent: str, child: str, length: int) -> None:
        source = self._held[parent]
        self._refuse_open(child)
        if not 0 <= length <= source.reserved:
            raise ValueError(f"fork of {parent!r} at {length}: {source.reserved} entries are reserved")
        shared = source.table[: -(-length // self._size)]
        for page in shared:
            self._pages.names[page] += 1
        source.floor = max(source.floor, length)
        self._held[child] = Held(shared, min(source.committed, length), length)

    def release(self, seq: str, fence: int = 0) -> None:
        held = self._held.pop(seq)
        self._drop(held.table, fence)
        self._leave(held, fence)

    def retire(self, step: int) -> None:
        self._pages.retire(step)

    def take_changes(self) -> CacheChanges:
        copies = [PageCopy(group=g, source=old, target=new) for new, old in self._copies.items() for g in self._groups]
        updates = []
        for seq, held in self._held.items():
            if held.untold is not None:
                told = tuple(held.table[held.untold :])
                updates += [TableUpdate(seq=seq, group=g, start=held.untold, pages=told) for g in self._groups]
                held.untold = None
        self._copies.clear()
        return CacheChanges(copies=tuple(copies), updates=tuple(updates))

    def table(self, seq: str) -> tuple[tuple[int, ...], ...]:
        table = tuple(self._held[seq].table)
        return tuple(table for _ in self._groups)

    def stats(self) -> CacheStats:
        times = len(self._groups)
        free, fenced = len(self._pages.free), len(self._pages.fenced)
        return CacheStats(
            total=times * self._pages.count,
            free=times * free,
            cached=0,
            held=times * (self._pages.count - free - fenced),
            fenced=times * fenced,
        )

    def reset_prefixes(self) -> None:
        """There are none."""

    def check_integrity(self) -> None:
        self._pages.check(
            names=Counter(page for held in self._held.values() for page in held.table),
            pins=Counter(page for held in self._held.values() for page in held.left),
        )

    def _refuse_open(self, seq: str) -> None:
        if seq in self._held:
            raise ValueError(f"sequence {seq!r} is open already")

    def _drop(self, pages: Sequence[int], fence: int) -> None:
        for page in pages:
            if self._pages.drop(page, fence):
                self._copies.pop(page, None)

    def _leave(self, held: Held, fence: int) -> None:
        for page in held.left:
            self._pages.unpin(page, fence)
        held.left.clear()


def _mark(held: Held, place: int) -> None:
    held.untold = place if held.untold is None else min(held.untold, place)


def _count(need: CacheNeed, options: Any) -> int:
    """Pages of each group that sequences can have: the budget pays for one null page a group, too."""
    count = need.budget_bytes // sum(group.page_bytes for group in need.groups) - 1
    return count if options.max_pages is None else min(count, options.max_pages)
