"""Attention over the paged KV cache, row by row, with the running softmax of FlashAttention (Dao et al., 2022).

Letters: n queries of a row, H query heads, K KV heads, G = H / K, D head size, L entries, b entries of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import torch
from pegboard.contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, KVLayout, LayerCache
from pegboard.contracts.batch import Rows
from pegboard.contracts.device import TensorSpec
from pegboard.dtypes import FLOAT_DTYPES
from torch import Tensor

from .options import Options


class Row(msgspec.Struct, frozen=True):
    """One row's place in q, and the cache entries that its queries see."""

    queries: slice
    #: [L] int64: flat entries, page * page size + offset
    entries: Tensor
    #: [L] and [n] int64: position of each entry and of each query.
    places: Tensor
    positions: Tensor


class Plan(msgspec.Struct, frozen=True):
    layer: AttentionLayer
    rows: list[Row]


class MyPart(AttentionBackend[Plan]):
    """Exact, and bit for bit independent of a row's neighbours, since no row is computed together with another."""

    def __init__(self, need: AttentionNeed, options: Options) -> None:
        self._page_size = need.page_size
        self._block = options.block

    @classmethod
    def refusals(cls, need: AttentionNeed, options: Options) -> Sequence[str]:
        """Everything that it can't do: what is accepted here must work in every step."""
        reasons = []
        if need.device.type != "cpu":
            reasons.append(f"reads row lengths on the host: runs on a CPU, not on {need.device.type}")
        if need.dtype not in FLOAT_DTYPES:
            reasons.append(f"computes in {', '.join(FLOAT_DTYPES)}, not in {need.dtype}")
        if need.kv_dtype != need.dtype:
            reasons.append(f"reads K/V of the compute dtype {need.dtype} only, not {need.kv_dtype}")
        if need.ancestors:
            reasons.append("does not verify trees of drafts")
        if need.score_mass:
            reasons.append("does not report score mass")
        reasons += [
            f"{layer.query_heads} query heads are no multiple of {layer.kv_heads} KV heads"
            for layer in need.layers
            if layer.query_heads % layer.kv_heads
        ]
        return reasons

    @classmethod
    def create(cls, need: AttentionNeed, options: Options) -> Self:
        return cls(need, options)

    @classmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Any) -> Sequence[KVLayout]:
        shape = (need.page_size, layer.kv_heads, layer.head_size)
        tensors = tuple(TensorSpec(name=name, shape=shape, dtype=need.kv_dtype) for name in ("k", "v"))
        return (KVLayout(name="nhd", tensors=tensors),)

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> Plan:
        starts, found = rows.query_start.tolist(), []
        for row, length in enumerate(rows.kv_len.tolist()):
            queries = slice(starts[row], starts[row + 1])
            count = queries.stop - queries.start
            if not length or not count:
                continue  # an idle row: its result stays zero
            first = 0 if layer.window is None else max(0, length - count - layer.window + 1)
            places = torch.arange(first, length)
            pages = rows.page_table[row, places // self._page_size].long()
            entries = pages * self._page_size + places % self._page_size
            found.append(Row(queries, entries, places, torch.arange(length - count, length)))
        return Plan(layer, found)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        plan: Plan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        keys, values = (cache.tensors[name].flatten(0, 1) for name in ("k", "v"))  # [entries, K, D]
        out = q.new_zeros(q.shape)
        for row in plan.rows:
            out[row.queries] = self._mix(q[row.queries], keys, values, row, plan.layer, sinks)
        return out

    def _mix(
        self, q: Tensor, keys: Tensor, values: Tensor, row: Row, layer: AttentionLayer, sinks: Tensor | None
    ) -> Tensor:
        """q [n, H, D] -> [n, H, D]. `peak`, `total` and `mixed` hold the greatest score, the sum of weights and the
        weighted sum of values of the blocks so far."""
        count, kv_heads = q.shape[0], layer.kv_heads
        work = torch.promote_types(q.dtype, torch.float32)
        queries = (q.to(work) * layer.scale).view(count, kv_heads, -1, layer.head_size).permute(1, 2, 0, 3)
        shape = queries.shape[:-1]  # [K, G, n]
        if sinks is None:
            peak = queries.new_full(shape, -torch.inf)
            total = queries.new_zeros(shape)
        else:  # a learned logit that takes part in the sum, and has no value
            peak = sinks.to(work).view(kv_heads, -1, 1).expand(shape)
            total = queries.new_ones(shape)
        mixed = torch.zeros_like(queries)
        for start in range(0, len(row.entries), self._block):
            part = slice(start, start + self._block)
            k, v = (cached[row.entries[part]].to(work).transpose(0, 1)[:, None] for cached in (keys, values))
            scores = queries @ k.transpose(2, 3)  # [K, G, n, b]
            if layer.softcap is not None:
                scores = layer.softcap * (scores / layer.softcap).tanh()
            distance = row.positions[:, None] - row.places[part]
            hidden = distance < 0 if layer.window is None else (distance < 0) | (distance >= layer.window)
            scores = scores.masked_fill(hidden, -torch.inf)
            highest = torch.maximum(peak, scores.amax(-1))
            safe = highest.masked_fill(highest == -torch.inf, 0)  # nothing is visible yet
            weights = (scores - safe[..., None]).exp()
            shrink = (peak - safe).exp()
            total = total * shrink + weights.sum(-1)
            mixed = mixed * shrink[..., None] + weights @ v
            peak = highest
        return (mixed / total[..., None]).permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)
