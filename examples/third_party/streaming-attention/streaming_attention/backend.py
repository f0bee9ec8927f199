"""Attention to the first tokens and to a window (Xiao et al., "Efficient streaming language models with attention
sinks", 2023): the work for a token stops growing with the text. Models put weight on the first tokens whatever they
are; without them a plain window breaks down.

Unlike the paper's, positions stay those of the text: keys are cached after rotation.

Letters: n queries of a row, H query heads, K KV heads, D head size, L entries that any of them sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, KVLayout, LayerCache
from pegboard.contracts.batch import Rows
from pegboard.contracts.device import TensorSpec
from pegboard.dtypes import FLOAT_DTYPES

from .options import Options


class Row(msgspec.Struct, frozen=True):
    queries: slice
    #: [L] int64: flat cache entries, page * page size + offset
    entries: Tensor
    #: [n, L] bool
    visible: Tensor


class Plan(msgspec.Struct, frozen=True):
    layer: AttentionLayer
    rows: list[Row]


class StreamingAttention(AttentionBackend[Plan]):
    """Row by row, so a row's bits don't depend on its neighbours. Exact for texts of up to `window` tokens."""

    def __init__(self, need: AttentionNeed, options: Options) -> None:
        self._page_size = need.page_size
        self._sinks = options.sinks
        self._window = options.window

    @classmethod
    def refusals(cls, need: AttentionNeed, options: Options) -> Sequence[str]:
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
        for layer in need.layers:
            if layer.query_heads % layer.kv_heads:
                reasons.append(f"{layer.query_heads} query heads are no multiple of {layer.kv_heads} KV heads")
            if layer.window is not None:
                reasons.append(f"the model has windows of its own ({layer.window}), which would be cut twice")
            if layer.softcap is not None or layer.sinks:
                reasons.append("knows neither soft caps nor learned sinks")
        return list(dict.fromkeys(reasons))

    @classmethod
    def create(cls, need: AttentionNeed, options: Options) -> Self:
        return cls(need, options)

    @classmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Options) -> Sequence[KVLayout]:
        shape = (need.page_size, layer.kv_heads, layer.head_size)
        tensors = tuple(TensorSpec(name=name, shape=shape, dtype=need.kv_dtype) for name in ("k", "v"))
        return (KVLayout(name="nhd", tensors=tensors),)

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> Plan:
        starts, found = rows.query_start.tolist(), []
        for row, length in enumerate(rows.kv_len.tolist()):
            queries = slice(starts[row], starts[row + 1])
            count = queries.stop - queries.start
            if length and count:
                place = self._places(length, count)
                page = rows.page_table[row, place // self._page_size].long()
                entries = page * self._page_size + place % self._page_size
                found.append(Row(queries, entries, self._visible(place, torch.arange(length - count, length))))
        return Plan(layer, found)

    def _places(self, length: int, count: int) -> Tensor:
        """[L]: what any of the last `count` queries of `length` entries sees."""
        recent = max(0, length - count - self._window + 1)
        return torch.cat([torch.arange(min(self._sinks, recent)), torch.arange(recent, length)])

    def _visible(self, place: Tensor, position: Tensor) -> Tensor:
        """[n, L] for queries at `position` [n]."""
        distance = position[:, None] - place
        return (distance >= 0) & ((distance < self._window) | (place < self._sinks))

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
        out = q.new_zeros(q.shape)  # idle rows keep their zeros
        for row in plan.rows:
            mixed = scaled_dot_product_attention(
                q[row.queries].transpose(0, 1),  # [H, n, D]
                keys[row.entries].transpose(0, 1),
                values[row.entries].transpose(0, 1),
                attn_mask=row.visible,
                scale=plan.layer.scale,
                enable_gqa=True,
            )
            out[row.queries] = mixed.transpose(0, 1)
        return out
