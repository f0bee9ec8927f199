"""How the byte budget is divided among cache groups."""

from __future__ import annotations

from pegboard.contracts.cache import CacheGroup, CacheNeed


def _cap(group: CacheGroup, need: CacheNeed) -> int | None:
    """Pages beyond which a group gains nothing; None: more always helps (a longer prefix cache)."""
    if group.kind == "state":
        # One a row, and one more while the page of the row's predecessor waits for its fence.
        return 2 * need.max_rows
    if group.kind == "window":
        window = group.window or 0
        # Every row's window with both ends cut by page borders, and one longest prompt in flight.
        return need.max_rows * (-(-window // need.page_size) + 2) + longest_pages(need)
    return None


def longest_pages(need: CacheNeed) -> int:
    """Pages of one sequence of `max_length` entries in a group that drops none."""
    return -(-need.max_length // need.page_size)


def least_bytes(need: CacheNeed) -> int:
    """Bytes below which one longest sequence does not fit, null pages included."""
    return sum((1 + (1 if g.kind == "state" else longest_pages(need))) * g.page_bytes for g in need.groups)


def pages_per_group(need: CacheNeed) -> tuple[int, ...]:
    """Pages of each group, the null page included.

    One level n for all groups: a group gets min(n, its cap) pages, n as large as the budget allows. Short sequences
    use the same number of pages in every group, so the smallest pool would bind; caps return what a windowed or state
    group can't use to the groups that can."""
    caps = [_cap(group, need) for group in need.groups]

    def pages(level: int) -> list[int]:
        return [1 + (level if cap is None else min(level, cap)) for cap in caps]

    def cost(level: int) -> int:
        return sum(n * group.page_bytes for n, group in zip(pages(level), need.groups, strict=True))

    low, high = 0, max(need.budget_bytes // min(group.page_bytes for group in need.groups), 0)
    if None not in caps:
        high = min(high, max(cap for cap in caps if cap is not None))
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) <= need.budget_bytes:
            low = middle
        else:
            high = middle - 1
    return tuple(pages(low))
