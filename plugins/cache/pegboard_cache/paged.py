"""The paged cache manager: reference-counted pages, prefix reuse, copy on write, fences.

Page tables as in Kwon et al. 2023 (PagedAttention); prefixes are found by chained hashes and confirmed by comparison.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Self

from pegboard.contracts.cache import CacheChanges, CacheManager, CacheNeed, CacheStats, PageCopy, TableUpdate

from .blocks import Block, PrefixIndex
from .options import PagedOptions
from .pool import PagePool
from .sizing import least_bytes, pages_per_group

_NOTHING = CacheChanges()
_TOKEN = array("q").itemsize


class _Held:
    """One open sequence."""

    __slots__ = (
        "blocks",
        "capacity",
        "committed",
        "dirty",
        "dropped",
        "floor",
        "left",
        "reserved",
        "root",
        "shared",
        "tables",
        "tail",
    )

    def __init__(self, groups: int, root: Block | None) -> None:
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        #: Pages dropped from the front of each table.
        self.dropped = [0] * groups
        #: First table index that the device does not know, per group; -1: it knows all.
        self.dirty = [-1] * groups
        #: Parent of the first block; None: the sequence does not take part in prefix reuse.
        self.root = root
        self.blocks: list[Block] = []
        #: Committed tokens after the last block.
        self.tail: list[int] = []
        self.committed = 0
        self.reserved = 0
        #: Entries that the tables can hold.
        self.capacity = 0
        #: No later step of this sequence writes an entry below this.
        self.floor = 0
        #: The page of entry `floor` may be named by another sequence, or bound to a block.
        self.shared = False
        #: (group, page) copied away from and pinned until a fence is known.
        self.left: list[tuple[int, int]] = []


class PagedCache(CacheManager):
    """Pages for sequences in every group, shared between equal prefixes and forks.

    *Where writes start.* With drafts in flight the host knows no exact next entry, but it knows a floor: entries that
    are committed, and entries that a fork named (they are final by contract). A page is shared only if it lies below
    the floor of all who name it, or holds the floor itself. So `reserve` looks at one page per group, the floor's: if
    another table names it, it is copied; if it is only bound to a reusable block, the block loses it. This holds at
    any depth, since steps run in order: what earlier steps write to the old page is written before the copy, and those
    who keep the old page write it after.

    *Costs.* Constant time a page; nothing on the step path scans. A failed `reserve` changes nothing.
    """

    def __init__(self, need: CacheNeed, options: PagedOptions) -> None:
        self._size = need.page_size
        self._groups = need.groups
        self._pages = pages_per_group(need)
        self._index = PrefixIndex(len(need.groups))
        self._pools = [PagePool(g, n, self._index) for g, n in enumerate(self._pages)]
        self._paged = [g for g, group in enumerate(need.groups) if group.kind != "state"]
        self._full = [g for g, group in enumerate(need.groups) if group.kind == "full"]
        self._states = [g for g, group in enumerate(need.groups) if group.kind == "state"]
        self._windows = [(g, group.window or 0) for g, group in enumerate(need.groups) if group.kind == "window"]
        # Only full pages are found by others; windows and recurrent states move with every token
        self.commit_stride = need.page_size if len(self._full) == len(need.groups) else 1
        self._reuse = options.prefix_reuse and not self._states
        self._seqs: dict[str, _Held] = {}
        #: Sequences with table changes that the device does not know, in the order they changed.
        self._changed: dict[str, None] = {}
        #: (group, target) -> source
        self._copies: dict[tuple[int, int], int] = {}
        self._queries = 0
        self._hits = 0

    @classmethod
    def refusals(cls, need: CacheNeed, options: PagedOptions) -> Sequence[str]:
        reasons = []
        if need.page_size < 16 or need.page_size & (need.page_size - 1):
            reasons.append(f"page_size is {need.page_size}; it must be a power of two, 16 or more")
        if not need.groups:
            reasons.append("the model has no layer that needs a cache")
        for place, group in enumerate(need.groups):
            if group.index != place:
                reasons.append(f"cache group {group.index} stands at place {place}; groups are numbered 0, 1, ...")
            if group.page_bytes < 1:
                reasons.append(f"cache group {group.index}: page_bytes is {group.page_bytes}; it must be positive")
            if group.kind == "window" and (group.window or 0) < 1:
                reasons.append(f"cache group {group.index}: window is {group.window}; it must be 1 or more")
        if need.max_query > 1 and any(group.kind == "state" for group in need.groups):
            reasons.append("drafts can't be taken back from a recurrent state: run this model without a speculator")
        if not reasons and need.budget_bytes < least_bytes(need):
            reasons.append(
                f"the budget is {need.budget_bytes} bytes; one sequence of {need.max_length} entries needs "
                f"{least_bytes(need)}: lower max_length or give more memory"
            )
        return reasons

    @classmethod
    def create(cls, need: CacheNeed, options: PagedOptions) -> Self:
        return cls(need, options)

    @property
    def pages(self) -> tuple[int, ...]:
        return self._pages

    def fits(self, length: int) -> bool:
        """A windowed group counts in full: one chunk may be as long as the sequence."""
        pages = -(-length // self._size)
        return all(self._pools[g].total >= pages for g in self._paged) and all(
            self._pools[g].total >= 1 for g in self._states
        )

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self, seq: str, tokens: Sequence[int], *, salt: str = "", reuse: bool = True) -> int:
        self._refuse_open(seq)
        held = _Held(len(self._groups), self._index.root(salt) if self._reuse else None)
        if held.root is not None:
            held.root.links += 1
            if reuse:
                self._queries += len(tokens)
                self._attach(held, self._lookup(held.root, tokens))
                self._hits += held.committed
        self._seqs[seq] = held
        if held.committed:
            self._changed[seq] = None
        return held.committed

    def _refuse_open(self, seq: str) -> None:
        if seq in self._seqs:
            raise ValueError(f"sequence {seq!r} is open already")

    def _lookup(self, root: Block, tokens: Sequence[int]) -> list[Block]:
        """The longest chain of blocks whose pages are all that a next query needs."""
        size = self._size
        pages = (len(tokens) - 1) // size
        data = array("q", tokens[: pages * size]).tobytes()
        width = size * _TOKEN
        chain: list[Block] = []
        best = 0
        runs = [0] * len(self._windows)
        parent = root
        for place in range(pages):
            block = self._index.find(parent, data[place * width : (place + 1) * width])
            if block is None or any(not block.pages[g] for g in self._full):
                break
            chain.append(block)
            parent = block
            end = place + 1
            whole = True
            for i, (g, window) in enumerate(self._windows):
                runs[i] = runs[i] + 1 if block.pages[g] else 0
                whole = whole and runs[i] >= end - self._first_seen(end * size, window)
            if whole:
                best = end
        return chain[:best]

    def _first_seen(self, query: int, window: int) -> int:
        """First page that a query at entry `query` sees through a window."""
        return max(0, query - window + 1) // self._size

    def _attach(self, held: _Held, chain: list[Block]) -> None:
        if not chain:
            return
        entries = len(chain) * self._size
        for block in chain:
            block.links += 1
        held.blocks = chain
        held.committed = held.floor = held.reserved = held.capacity = entries
        firsts = dict.fromkeys(self._full, 0)
        for g, window in self._windows:
            firsts[g] = self._first_seen(entries, window)
        for g, first in firsts.items():
            pages = [block.pages[g] for block in chain[first:]]
            for page in pages:
                self._pools[g].share(page)
            held.tables[g] = [0] * first + pages
            held.dropped[g] = first
            held.dirty[g] = 0

    def reserve(self, seq: str, length: int) -> bool:
        held = self._seqs[seq]
        if length < held.floor:
            raise ValueError(f"sequence {seq!r}: {length} entries asked for, {held.floor} are final already")
        if (length > held.capacity or held.shared) and not self._grow(seq, held, length):
            return False
        if length > held.reserved:
            held.reserved = length
        return True

    def _grow(self, seq: str, held: _Held, length: int) -> bool:
        pages = -(-length // self._size)
        floor = held.floor // self._size
        writes = held.shared and length > held.floor
        copied = []
        for g in self._paged:
            table, pool = held.tables[g], self._pools[g]
            copy = writes and floor < len(table) and pool.sharers(table[floor]) > 1
            if max(0, pages - len(table)) + copy > pool.available:
                return False
            if copy:
                copied.append(g)
        for g in self._states:
            if not held.tables[g] and not self._pools[g].available:
                return False
        if writes:
            for g in self._paged:
                if g in copied:
                    self._copy_page(held, g, floor)
                elif floor < len(held.tables[g]):
                    self._pools[g].unbind(held.tables[g][floor])
            held.shared = False
        for g in self._paged:
            table, pool = held.tables[g], self._pools[g]
            if len(table) < pages:
                self._mark(held, g, len(table))
                table.extend([pool.take() for _ in range(pages - len(table))])
        for g in self._states:
            if not held.tables[g]:
                self._mark(held, g, 0)
                held.tables[g].append(self._pools[g].take())
        held.capacity = max(held.capacity, pages * self._size)
        if any(start >= 0 for start in held.dirty):
            self._changed[seq] = None
        return True

    def _copy_page(self, held: _Held, g: int, place: int) -> None:
        """Steps in flight may still write to the old page for this sequence: it keeps a pin until the next call that
        brings a fence."""
        pool, old = self._pools[g], held.tables[g][place]
        new = pool.take()
        self._copies[g, new] = old
        held.tables[g][place] = new
        pool.pin(old)
        held.left.append((g, old))
        self._mark(held, g, place)

    @staticmethod
    def _mark(held: _Held, g: int, place: int) -> None:
        if held.dirty[g] < 0 or place < held.dirty[g]:
            held.dirty[g] = place

    def commit(self, seq: str, tokens: Sequence[int], fence: int = 0) -> None:
        held = self._seqs[seq]
        committed = held.committed + len(tokens)
        if committed > held.reserved:
            raise ValueError(f"sequence {seq!r}: {committed} entries committed, {held.reserved} were reserved")
        if held.root is not None:
            held.tail.extend(tokens)
            if len(held.tail) >= self._size:
                self._register(held)
        held.committed = committed
        if committed > held.floor:
            held.floor = committed
        if self._windows:
            self._slide(held, fence)
        if held.left:
            self._unpin(held, fence)

    def _register(self, held: _Held) -> None:
        """Turn full pages' worth of the tail into blocks that others can find."""
        whole = len(held.tail) // self._size * self._size
        data = array("q", held.tail[:whole]).tobytes()
        width = self._size * _TOKEN
        parent = held.blocks[-1] if held.blocks else held.root
        for start in range(0, len(data), width):
            if parent is None:
                raise AssertionError("a sequence without a root does not register blocks")
            block = self._index.obtain(parent, data[start : start + width])
            block.links += 1
            place = len(held.blocks)
            held.blocks.append(block)
            for g in self._paged:
                self._offer(block, g, held.tables[g][place])
            parent = block
        del held.tail[:whole]

    def _offer(self, block: Block, g: int, page: int) -> None:
        if page and block.indexed and not block.pages[g]:
            self._pools[g].bind(page, block)

    def _slide(self, held: _Held, fence: int) -> None:
        for g, window in self._windows:
            first = min(self._first_seen(held.committed, window), len(held.tables[g]))
            for place in range(held.dropped[g], first):
                self._let_go(held, g, place, fence)
                held.tables[g][place] = 0
            held.dropped[g] = max(held.dropped[g], first)

    def _let_go(self, held: _Held, g: int, place: int, fence: int) -> None:
        page, pool = held.tables[g][place], self._pools[g]
        if not page:
            return
        if place < len(held.blocks):
            block = held.blocks[place]
            self._offer(block, g, page)
            if block.pages[g] != page:
                # Another page stands for the block: it must outlive the blocks that hang on it.
                pool.touch(block.pages[g])
        if pool.drop(page, fence):
            self._copies.pop((g, page), None)

    def _unpin(self, held: _Held, fence: int) -> None:
        for g, page in held.left:
            if self._pools[g].unpin(page, fence):
                self._copies.pop((g, page), None)
        held.left.clear()

    def truncate(self, seq: str, length: int, fence: int = 0) -> None:
        held = self._seqs[seq]
        if length < held.floor or length > held.reserved:
            raise ValueError(f"sequence {seq!r}: cut to {length}; between {held.floor} and {held.reserved} is right")
        pages = -(-length // self._size)
        for g in self._paged:
            table = held.tables[g]
            for place in range(len(table) - 1, pages - 1, -1):
                self._let_go(held, g, place, fence)
            del table[pages:]
            if held.dirty[g] >= len(table):
                held.dirty[g] = -1
        held.reserved = length
        held.capacity = min(held.capacity, pages * self._size)
        self._unpin(held, fence)

    def fork(self, parent: str, child: str, length: int) -> None:
        """Also ValueError when a windowed group has dropped what a query at `length` sees, when the parent's recurrent
        state stands elsewhere than at `length`, and when there is no page for the copy of the state."""
        source = self._seqs[parent]
        self._refuse_open(child)
        if not 0 <= length <= source.reserved:
            raise ValueError(f"fork of {parent!r} at {length}: {source.reserved} entries are reserved")
        firsts = dict.fromkeys(self._full, 0)
        for g, window in self._windows:
            firsts[g] = self._first_seen(length, window)
            if firsts[g] < source.dropped[g]:
                raise ValueError(f"fork of {parent!r} at {length}: group {g} has dropped entries that it would see")
        for g in self._states:
            if length and length != source.reserved:
                raise ValueError(f"fork of {parent!r} at {length}: its state is that after {source.reserved} entries")
            if length and not self._pools[g].available:
                raise ValueError(f"fork of {parent!r}: no page for the state in group {g}")
        held = _Held(len(self._groups), source.root)
        held.committed = min(source.committed, length)
        held.floor = held.reserved = length
        held.shared = bool(length % self._size)
        self._inherit(held, source)
        pages = -(-length // self._size)
        for g, first in firsts.items():
            shared = source.tables[g][first:pages]
            for page in shared:
                self._pools[g].share(page)
            held.tables[g] = [0] * first + shared
            held.dropped[g] = first
            held.dirty[g] = 0
        for g in self._states:
            if length:
                page = self._pools[g].take()
                self._copies[g, page] = source.tables[g][0]
                held.tables[g] = [page]
                held.dirty[g] = 0
        held.capacity = pages * self._size
        source.floor = max(source.floor, length)
        source.shared = source.shared or held.shared
        self._seqs[child] = held
        self._changed[child] = None

    def _inherit(self, held: _Held, source: _Held) -> None:
        """The committed tokens, as blocks and tail."""
        if held.root is None:
            return
        held.root.links += 1
        whole, rest = divmod(held.committed, self._size)
        held.blocks = source.blocks[:whole]
        for block in held.blocks:
            block.links += 1
        if whole < len(source.blocks):
            held.tail = array("q", source.blocks[whole].tokens[: rest * _TOKEN]).tolist()
        else:
            held.tail = source.tail[:rest]

    def release(self, seq: str, fence: int = 0) -> None:
        held = self._seqs.pop(seq)
        self._changed.pop(seq, None)
        for g, table in enumerate(held.tables):
            for place in range(len(table) - 1, held.dropped[g] - 1, -1):
                self._let_go(held, g, place, fence)
        self._unpin(held, fence)
        for block in reversed(held.blocks):
            self._index.unlink(block)
        self._index.unlink(held.root)

    def retire(self, step: int) -> None:
        for pool in self._pools:
            pool.retire(step)

    # -- reports -----------------------------------------------------------------------------------------------------

    def take_changes(self) -> CacheChanges:
        if not self._changed and not self._copies:
            return _NOTHING
        copies = tuple(PageCopy(group=g, source=source, target=to) for (g, to), source in self._copies.items())
        updates = []
        for seq in self._changed:
            held = self._seqs[seq]
            for g, start in enumerate(held.dirty):
                if start >= 0:
                    updates.append(TableUpdate(seq=seq, group=g, start=start, pages=tuple(held.tables[g][start:])))
                    held.dirty[g] = -1
        self._copies.clear()
        self._changed.clear()
        return CacheChanges(copies=copies, updates=tuple(updates))

    def table(self, seq: str) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(table) for table in self._seqs[seq].tables)

    def stats(self) -> CacheStats:
        total = free = cached = fenced = 0
        for pool in self._pools:
            total += pool.total
            free += len(pool.free)
            cached += len(pool.cached)
            fenced += pool.fenced
        return CacheStats(
            total=total,
            free=free,
            cached=cached,
            held=total - free - cached - fenced,
            fenced=fenced,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
        )

    def reset_prefixes(self) -> None:
        """Open sequences go on, but nothing that they have computed or will compute is offered to others."""
        for pool in self._pools:
            pool.forget()
        self._index.clear()
        for held in self._seqs.values():
            held.root = None
            held.blocks = []
            held.tail = []

    def check_integrity(self) -> None:
        refs: list[dict[int, int]] = [dict(pool.pins) for pool in self._pools]
        for seq, held in self._seqs.items():
            bounds = (held.committed, held.floor, held.reserved, held.capacity)
            if list(bounds) != sorted(bounds):
                raise AssertionError(f"{seq!r}: committed, floor, reserved, capacity are out of order: {bounds}")
            for g, table in enumerate(held.tables):
                for page in table[held.dropped[g] :]:
                    refs[g][page] = refs[g].get(page, 0) + 1
        for pool, counts in zip(self._pools, refs, strict=True):
            pool.check(counts)
        for seq, held in self._seqs.items():
            first = held.floor // self._size + held.shared
            for g in self._paged:
                pool = self._pools[g]
                for page in held.tables[g][first:]:
                    if pool.sharers(page) > 1 or pool.blocks[page] is not None:
                        raise AssertionError(f"{seq!r}: page {page} of group {g} is writable and shared or reusable")
        for (g, target), source in self._copies.items():
            if not self._pools[g].refs[target]:
                raise AssertionError(f"group {g}: page {target} waits for a copy of {source} but nobody holds it")
