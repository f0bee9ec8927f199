"""Attention in plain torch, on any device: the oracle for every kernel, and what CPU users run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, KVLayout, LayerCache
from pegboard.contracts.batch import Rows
from pegboard.contracts.device import TensorSpec
from pegboard.dtypes import FLOAT_DTYPES, torch_dtype
from pegboard.errors import PegboardError

from .tiles import Tile, make_tiles

#: A query's ancestors are the bits of a signed 64-bit integer.
MAX_TREE_QUERIES = 63
#: Queries of a whole prompt that a CPU attends for at a time, and the longest prompt for which that is done.
_RUN = 64
_LONGEST_MASK = 2048


class OneTile:
    """A dense batch with room for its gathered K/V, [entries, K, D]. Fresh memory costs more than the copy into it."""

    def __init__(self, tile: Tile, layer: AttentionLayer, like: Tensor) -> None:
        self._tile = tile
        self._layer = layer
        self._group = layer.query_heads // layer.kv_heads
        self._k, self._v = (like.new_empty(tile.entry.shape[0], *like.shape[1:]) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R * n, H, D], k and v [entries of the cache, K, D] -> [R * n, H, D]"""
        tile, layer = self._tile, self._layer
        shape = (tile.rows, tile.queries, layer.kv_heads, self._group, layer.head_size)
        queries = q.view(shape).transpose(1, 2).reshape(tile.rows, layer.kv_heads, -1, layer.head_size)
        out = scaled_dot_product_attention(
            queries,
            self._gather(k, self._k),
            self._gather(v, self._v),
            attn_mask=tile.mask(0, self._group, q.dtype),
            scale=layer.scale,
        )
        out = out.view(tile.rows, layer.kv_heads, tile.queries, self._group, -1).transpose(1, 2)
        return out.masked_fill(tile.idle[:, None, None, None, None], 0).reshape(q.shape)

    def _gather(self, entries: Tensor, room: Tensor) -> Tensor:
        torch.index_select(entries, 0, self._tile.entry, out=room)
        return room.view(self._tile.rows, self._tile.columns, *room.shape[1:]).transpose(1, 2)  # [R, K, L, D]


class TorchPlan:
    """A step's tiles, made when the first layer needs them, and room for gathered K/V that all layers share."""

    def __init__(self, rows: Rows, layer: AttentionLayer, page_size: int) -> None:
        self.rows = rows
        self.layer = layer
        self._page_size = page_size
        self._scratch: tuple[Tensor, Tensor] | None = None
        self._only: OneTile | None = None
        self._causal: Tensor | None = None

    @cached_property
    def tiles(self) -> list[Tile]:
        return make_tiles(self.rows, self.layer, self._page_size)

    def only(self, like: Tensor) -> OneTile | None:
        """What most decode steps are: dense rows whose entries and scores fit into one tile of one block."""
        if self._only is None:
            [tile, *more] = self.tiles
            is_plain = self.layer.softcap is None and not self.layer.sinks
            if not is_plain or more or tile.token is not None or len(tile.blocks) > 1:
                return None
            self._only = OneTile(tile, self.layer, like)
        return self._only

    @property
    def fresh(self) -> bool:
        """Whether every row that is not idle has no entries but its own queries, and sees all of them up to itself."""
        bounds, layer = self.rows.bounds, self.layer
        return (
            bounds.max_kv <= bounds.max_query == bounds.min_query
            and self.rows.ancestors is None
            and (layer.window is None or layer.window >= bounds.max_query)
        )

    def causal(self, q: Tensor) -> Tensor | None:
        """For whole prompts [R, H, n, D], 0 or -inf [n, n]; None where a run of queries is all of them, or too much."""
        queries = q.shape[2]
        if not _RUN < queries <= _LONGEST_MASK:
            return None
        if self._causal is None:
            self._causal = q.new_full((queries, queries), -torch.inf).triu_(1)
        return self._causal

    def scratch(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two buffers [entries, K, D] for the widest tile. Fresh pages of memory cost more than the copy into them."""
        if self._scratch is None:
            entries = max(tile.rows * tile.columns for tile in self.tiles)
            self._scratch = (like.new_empty(entries, *like.shape[1:]), like.new_empty(entries, *like.shape[1:]))
        return self._scratch


class TorchAttention(AttentionBackend[TorchPlan]):
    """Exact attention over paged K/V of the compute dtype; softmax in float32 (float64 for float64).

    Rows are padded into dense tiles (see `tiles`); the entries of a tile are gathered, so a step needs room for one
    layer's K/V of `tiles.GATHER_ELEMENTS`, or of one row if that is longer, and for a block of scores or masks."""

    def __init__(self, need: AttentionNeed) -> None:
        self._dtype = torch_dtype(need.dtype)
        self._page_size = need.page_size

    @classmethod
    def refusals(cls, need: AttentionNeed, options: Any) -> Sequence[str]:
        reasons = []
        if need.dtype not in FLOAT_DTYPES:
            reasons.append(f"computes in {', '.join(FLOAT_DTYPES)}, not in {need.dtype}")
        if need.kv_dtype != need.dtype:
            reasons.append(f"reads K/V of the compute dtype {need.dtype} only, not {need.kv_dtype}")
        if need.score_mass:
            reasons.append("does not report score mass")
        if need.batch_invariant:
            reasons.append("is not bit for bit independent of a row's neighbours: torch picks kernels by shape")
        if need.ancestors and need.phase == "decode" and need.max_query > MAX_TREE_QUERIES:
            reasons.append(f"verifies trees of at most {MAX_TREE_QUERIES} queries, not {need.max_query}")
        reasons.extend(
            f"{layer.query_heads} query heads are no multiple of {layer.kv_heads} KV heads"
            for layer in dict.fromkeys(need.layers)
            if layer.query_heads % layer.kv_heads
        )
        return reasons

    @classmethod
    def create(cls, need: AttentionNeed, options: Any) -> Self:
        return cls(need)

    @classmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Any) -> Sequence[KVLayout]:
        shape = (need.page_size, layer.kv_heads, layer.head_size)
        tensors = tuple(TensorSpec(name=name, shape=shape, dtype=need.kv_dtype) for name in ("k", "v"))
        return (KVLayout(name="nhd", tensors=tensors),)

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> TorchPlan:
        return TorchPlan(rows, layer, self._page_size)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        plan: TorchPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        layer = plan.layer
        expected = (plan.rows.bounds.tokens, layer.query_heads, layer.head_size)
        if q.dtype != self._dtype or q.shape != expected:
            raise PegboardError(f"q is {tuple(q.shape)} {q.dtype}; the plan is for {expected} {self._dtype}")
        if layer.sinks != (sinks is not None):
            raise PegboardError("the layer has sinks and none were given" if layer.sinks else "sinks without need")
        if k is not None and v is not None and plan.fresh and self._can_use_sdpa_without_mask(layer, q):
            return _fresh(q, k, v, plan)
        entries = [cache.tensors[name].flatten(0, 1) for name in ("k", "v")]
        only = plan.only(entries[0])
        return _tiled(q, entries, plan, sinks) if only is None else only.forward(q, *entries)

    def _can_use_sdpa_without_mask(self, layer: AttentionLayer, q: Tensor) -> bool:
        if layer.softcap is not None or layer.sinks:
            return False
        # Elsewhere torch would fall back to all scores at once
        return q.device.type == "cpu" or (q.dtype in (torch.float16, torch.bfloat16) and layer.head_size <= 256)


def _fresh(q: Tensor, k: Tensor, v: Tensor, plan: TorchPlan) -> Tensor:
    """A dense batch of whole prompts: causal attention over the given k and v."""
    rows, layer = plan.rows.bounds.rows, plan.layer
    q, k, v = (x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    grouped = layer.query_heads != layer.kv_heads
    mask = plan.causal(q) if q.device.type == "cpu" else None
    if mask is None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=grouped)
    else:
        out = torch.cat(
            [
                scaled_dot_product_attention(
                    q[:, :, start:end],
                    k[:, :, :end],
                    v[:, :, :end],
                    attn_mask=mask[start:end, :end],
                    scale=layer.scale,
                    enable_gqa=grouped,
                )
                for start, end in _runs(q.shape[2])
            ],
            dim=2,
        )
    out = out.transpose(1, 2)
    idle = (plan.rows.kv_len == 0)[:, None, None, None]
    return out.masked_fill(idle, 0).contiguous().flatten(0, 1)


def _runs(queries: int) -> Iterator[tuple[int, int]]:
    """torch's kernel for CPUs computes much of what causality masks: shorter runs of queries see fewer entries."""
    return ((start, min(start + _RUN, queries)) for start in range(0, queries, _RUN))


def _tiled(q: Tensor, entries: Sequence[Tensor], plan: TorchPlan, sinks: Tensor | None) -> Tensor:
    """`entries`: k and v of the layer's whole cache, [entries, K, D]."""
    layer, tokens = plan.layer, q.shape[0]
    heads = (layer.kv_heads, layer.query_heads // layer.kv_heads, layer.head_size)
    # One row more: where the padding of ragged tiles goes
    out = q.new_empty(tokens + 1, *heads)
    for tile in plan.tiles:
        k, v = (
            torch.index_select(source, 0, tile.entry, out=buffer[: tile.entry.shape[0]])
            .view(tile.rows, tile.columns, heads[0], heads[2])
            .transpose(1, 2)
            for source, buffer in zip(entries, plan.scratch(entries[0]), strict=True)
        )  # [R, K, L, D]
        place = slice(tile.first_row * tile.queries, (tile.first_row + tile.rows) * tile.queries)
        queries = q[place] if tile.token is None else q.index_select(0, tile.token)
        queries = queries.reshape(tile.rows, tile.queries, *heads).permute(0, 2, 1, 3, 4)  # [R, K, n, G, D]
        mixed = out[place] if tile.scatter is None else out.new_empty(tile.scatter.shape[0], *heads)
        by_row = mixed.view(tile.rows, tile.queries, *heads)  # [R, n, K, G, D]
        for index, (slots, columns) in enumerate(tile.blocks):
            part = queries[:, :, slots]
            block = _block(
                part.reshape(tile.rows, heads[0], -1, heads[2]),
                k[:, :, columns],
                v[:, :, columns],
                tile.mask(index, heads[1], q.dtype),
                layer,
                sinks,
            )
            by_row[:, slots] = block.reshape(tile.rows, heads[0], -1, *heads[1:]).permute(0, 2, 1, 3, 4)
        by_row.masked_fill_(tile.idle[:, None, None, None, None], 0)
        if tile.scatter is not None:
            out.index_copy_(0, tile.scatter, mixed)
    return out[:tokens].flatten(1, 2)


def _block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layer: AttentionLayer, sinks: Tensor | None) -> Tensor:
    """q [R, K, n * G, D] (slot-major), k and v [R, K, L, D], mask [R, 1, n * G, L] -> [R, K, n * G, D]"""
    if layer.softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    work = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(work) * layer.scale) @ k.to(work).transpose(2, 3)
    if layer.softcap is not None:
        scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    scores += mask
    if sinks is None:
        return (scores.softmax(-1) @ v.to(work)).to(q.dtype)
    group = layer.query_heads // layer.kv_heads
    sink = sinks.to(work).view(layer.kv_heads, group).repeat(1, q.shape[2] // group)[..., None]  # [K, n * G, 1]
    peak = scores.amax(-1, keepdim=True).maximum(sink)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True) + (sink - peak).exp()
    return ((weights @ v.to(work)) / total).to(q.dtype)
