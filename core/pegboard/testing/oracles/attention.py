"""Steps of attention as data, and what they must give: the definition over dense rows in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from ...contracts.attention import AttentionLayer, LayerCache
from ...contracts.batch import Bounds, Rows


def visible(queries: int, kv_len: int, window: int | None, ancestors: Sequence[int] | None) -> Tensor:
    """[queries, kv_len] bool: what each query of a row may see, as `Rows` says. A window counts positions: of a tree,
    those along a query's own path."""
    entry, first = torch.arange(kv_len), kv_len - queries
    own = torch.arange(queries)
    if ancestors is None:
        place, position = entry, first + own
        seen = entry <= position[:, None]
    else:
        depth = torch.tensor([mask.bit_count() - 1 for mask in ancestors])
        position = first + depth
        place = torch.cat([entry[:first], position])
        bits = torch.tensor(ancestors)[:, None] >> own & 1 == 1
        seen = torch.cat([torch.ones(queries, first, dtype=torch.bool), bits], dim=1)
    return seen if window is None else seen & (place > position[:, None] - window)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, layer: AttentionLayer, sinks: Tensor | None) -> Tensor:
    """softmax(softcap(q k^T * scale)) v over what is seen, in float64. q [n, H, D], k and v [L, K, D], seen [n, L]."""
    group = layer.query_heads // layer.kv_heads
    # What is not seen must not count even where it is NaN
    hidden = ~seen.any(0)
    k, v = (x.masked_fill(hidden[:, None, None], 0).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hnl,lhd->nhd", weights, v)


@dataclass(frozen=True)
class Step:
    """Rows of (queries, entries in the cache); 0 entries: an idle row."""

    rows: tuple[tuple[int, int], ...]
    #: Per row, the ancestor mask of each query.
    ancestors: tuple[tuple[int, ...], ...] | None = None
    #: How far the host's bound of the longest row is above the truth.
    slack: int = 0
    #: All rows name the same first pages (or all of theirs, if they have fewer).
    shared_pages: int = 0
    #: Multiplies q.
    spread: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Built:
    """A step on the device. The cache holds random values wherever nothing else is said."""

    step: Step
    layer: AttentionLayer
    q: Tensor
    #: The step's own K and V, as the write op may hand them over; None for a quantized cache.
    k: Tensor | None
    v: Tensor | None
    cache: LayerCache
    rows: Rows
    sinks: Tensor | None

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """Everything that a backend must not change, by name."""
        rows = {f"rows.{n}": getattr(self.rows, n) for n in ("query_start", "kv_len", "page_table", "row_slot")}
        cache = {f"cache.{name}": tensor for name, tensor in self.cache.tensors.items()}
        more = {"rows.ancestors": self.rows.ancestors, "sinks": self.sinks}
        return {"q": self.q, "k": self.k, "v": self.v, **cache, **rows, **more}

    def entries(self, row: int) -> Tensor:
        """Flat cache entries of the row, in order."""
        entry, size = torch.arange(self.step.rows[row][1]), self.cache.page_size
        return self.rows.page_table[row].cpu()[entry // size].long() * size + entry % size

    def seen(self, row: int) -> Tensor:
        queries, kv_len = self.step.rows[row]
        ancestors = None if self.step.ancestors is None else self.step.ancestors[row]
        return visible(queries, kv_len, self.layer.window, ancestors)

    def seen_entries(self) -> Tensor:
        """Flat entries that any query may see."""
        found = [self.entries(r)[self.seen(r).any(0)] for r, (_, kv_len) in enumerate(self.step.rows) if kv_len]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def tokens(self, row: int) -> slice:
        start = sum(n for n, _ in self.step.rows[:row])
        return slice(start, start + self.step.rows[row][0])

    def expected(self, read: Callable[[LayerCache, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """[T, H, D] float64. `read` gives K and V of flat entries."""
        q, sinks = self.q.cpu().double(), None if self.sinks is None else self.sinks.cpu()
        out = torch.zeros_like(q)
        for row, (_, kv_len) in enumerate(self.step.rows):
            if kv_len:
                k, v = read(self.cache, self.entries(row))
                out[self.tokens(row)] = attend(q[self.tokens(row)], k, v, self.seen(row), self.layer, sinks)
        return out

    def select(self, chosen: Sequence[int]) -> Built:
        """The same rows of the same cache in a step of their own, in this order."""
        step = replace(
            self.step,
            rows=tuple(self.step.rows[row] for row in chosen),
            ancestors=None if self.step.ancestors is None else tuple(self.step.ancestors[row] for row in chosen),
            slack=0,
        )
        tokens = torch.cat([torch.arange(s.start, s.stop) for s in map(self.tokens, chosen)]).to(self.q.device)
        index = torch.tensor(list(chosen), device=self.q.device)
        rows = make_rows(step, self.rows.page_table[index], self.rows.row_slot[index])
        q, k, v = (None if x is None else x[tokens] for x in (self.q, self.k, self.v))
        assert q is not None
        return replace(self, step=step, q=q, k=k, v=v, rows=rows)


def make_rows(step: Step, page_table: Tensor, row_slot: Tensor) -> Rows:
    """The record that a backend sees."""
    device = page_table.device
    lengths = [n for n, _ in step.rows]
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    ancestors = None if step.ancestors is None else torch.tensor([m for row in step.ancestors for m in row])
    return Rows(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor([kv_len for _, kv_len in step.rows], dtype=torch.int32, device=device),
        page_table=page_table,
        row_slot=row_slot,
        ancestors=None if ancestors is None else ancestors.to(device),
        bounds=Bounds(
            rows=len(lengths),
            tokens=starts[-1],
            max_query=max(lengths),
            min_query=min(lengths),
            max_kv=max(kv_len for _, kv_len in step.rows) + step.slack,
        ),
    )


def page_tables(step: Step, page_size: int, window: int | None, device: str) -> tuple[Tensor, int]:
    """Shuffled tables [R, P] int32, a slice of a wider tensor as in the engine, and how many pages there are. Ids past
    a row's last entry are arbitrary ones of other pages; pages that fell out of the window are the null page."""
    generator = torch.Generator().manual_seed(step.seed + 1)
    count = len(step.rows)
    width = max(1, -(-(max(kv_len for _, kv_len in step.rows) + step.slack) // page_size))
    pages = count * width + 1
    table = (torch.randperm(pages - 1, generator=generator) + 1).view(count, width)
    table[:, : step.shared_pages] = table[:1, : step.shared_pages]
    for row, (queries, kv_len) in enumerate(step.rows):
        past = -(-kv_len // page_size)
        table[row, past:] = torch.randint(0, pages, (width - past,), generator=generator)
        if window is not None:
            table[row, : max(0, kv_len - queries - window + 1) // page_size] = 0
    wide = torch.zeros(count, width + 3, dtype=torch.int32, device=device)
    wide[:, :width] = table
    return wide[:, :width], pages


def with_bounds(rows: Rows, **bounds: int) -> Rows:
    """The same rows under other bounds."""
    return msgspec.structs.replace(rows, bounds=msgspec.structs.replace(rows.bounds, **bounds))
