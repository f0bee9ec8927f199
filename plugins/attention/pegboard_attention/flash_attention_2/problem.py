"""What a launch of the forward pass is told, whichever kernel runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .schedule import Schedule
    from .tiling import Tiling

#: A tile holds at least this many queries, so at most TILE_ROWS / MIN_TILE_TOKENS heads are packed.
MIN_TILE_TOKENS = 8
#: More entries than a row can have, with room for sums in 32 bits.
EVERYTHING = 2**30
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Mixing:
    """How queries and entries meet. A query at entry p sees entries e <= p with p - e < window, or all of its row's
    when not causal; scores = softcap * tanh(scale * q.k / softcap)."""

    query_heads: int
    kv_heads: int
    head_size: int
    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def packed_heads(self, tile_rows: int) -> int:
        """How many query heads of one KV head stand side by side in a tile: they share its K and V. A power of two."""
        group = self.query_heads // self.kv_heads
        return min(group & -group, tile_rows // MIN_TILE_TOKENS)

    @property
    def exponents(self) -> tuple[float, float]:
        """(factor of a score in the exponent of 2, factor of q.k before it is capped)

        A capped score is softcap * tanh(x), tanh(x) = 1 - 2 / (e^2x + 1); the second factor gives 2x in powers of 2.
        """
        if self.softcap is None:
            return self.scale * LOG2E, 0.0
        return self.softcap * LOG2E, 2 * LOG2E * self.scale / self.softcap

    @property
    def reach(self) -> int:
        """How far back a query sees, its own entry included."""
        return EVERYTHING if self.window is None else min(self.window, EVERYTHING)


@dataclass(frozen=True)
class Entries:
    """K and V. Paged: k and v [pages, S, K, D] in any strides but the last, table [R, P] int32. Side by side: k and v
    [1, entries, K, D], starts [R] int32: where each row's entries begin.

    Quantized: k and v are bytes in pages, v with the entries of a page side by side (stride 1); scales [pages, S, K]
    float32, of the same strides; `format` is the FORMAT of `widening.widen`."""

    k: Tensor
    v: Tensor
    table: Tensor | None = None
    starts: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    format: int = 0

    @property
    def page_size(self) -> int:
        """0 when the entries lie side by side."""
        return 0 if self.table is None else self.k.shape[1]


@dataclass(frozen=True)
class Forward:
    """One launch: q [T, H, D] -> out [T, H, D], both of one dtype; lse [H, T] float32 or None."""

    q: Tensor
    entries: Entries
    schedule: Schedule
    mixing: Mixing
    tiling: Tiling
    out: Tensor
    lse: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def heads(self) -> int:
        """Query heads side by side in a tile."""
        return self.mixing.packed_heads(self.tiling.rows)

    @property
    def groups(self) -> int:
        return self.mixing.query_heads // self.heads

    # What both kernels take, in their order

    def tensors(self) -> tuple[Tensor, ...]:
        """lse, sinks, page table, starts, tiles and their count; anything in place of those that are not used."""
        entries, nothing = self.entries, self.schedule.count
        given = (self.lse, self.sinks, entries.table, entries.starts)
        return (*(nothing if x is None else x for x in given), self.schedule.tiles, self.schedule.count)

    def numbers(self) -> tuple[float, ...]:
        mixing, table = self.mixing, self.entries.table
        strides = (0 if table is None else table.stride(0), self.q.shape[0])
        return (*strides, *mixing.exponents, mixing.reach, self.groups, self.groups // mixing.kv_heads)

    def constants(self) -> dict[str, Any]:
        mixing = self.mixing
        return {
            "BLOCK": self.tiling.block,
            "PAGE": self.entries.page_size,
            "HEADS": self.heads,
            "CAUSAL": mixing.causal,
            "WINDOW": mixing.window is not None,
            "SOFTCAP": mixing.softcap is not None,
            "SINKS": self.sinks is not None,
            "LSE": self.lse is not None,
            "HEAD_SIZE": mixing.head_size,
            "num_warps": self.tiling.warps,
        }
