"""Attention on a CPU in float32, compiled for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, KVLayout, LayerCache
from pegboard.contracts.batch import Rows
from pegboard.contracts.device import TensorSpec
from pegboard.errors import PegboardError

from . import team

#: Products that a thread should have before it is worth waking.
_ENOUGH: Final = 1 << 17


class NumbaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What all layers of a step have in common."""

    threads: int
    rows: Rows
    layer: AttentionLayer


class NumbaAttention(AttentionBackend[NumbaPlan]):
    """K/V in the "nhd" order; one kernel for prompts and one for decode rows, which reads entries where they lie. A
    row's bits do not depend on its neighbours."""

    def __init__(self, need: AttentionNeed) -> None:
        from . import attention_kernel, prefill_kernel

        self._page_size = need.page_size
        if need.phase == "prefill":
            self._attend = team.Kernel(prefill_kernel.prefill, prefill_kernel.LAYOUT)
            numbers = prefill_kernel.scratch_numbers
        else:
            self._attend = team.Kernel(attention_kernel.attend, attention_kernel.LAYOUT)
            numbers = attention_kernel.scratch_numbers
        self._numbers = max(numbers(layer.query_heads // layer.kv_heads, layer.head_size) for layer in need.layers)
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    @classmethod
    def refusals(cls, need: AttentionNeed, options: Any) -> Sequence[str]:
        from .tiles import HEAD_STEP, SCORES

        reasons = team.refusals()
        if need.device.type != "cpu":
            reasons.append(f"runs on the CPU, not on {need.device.type}")
        if need.dtype != "float32":
            reasons.append(f"computes in float32, not in {need.dtype}")
        if need.kv_dtype != "float32":
            reasons.append(f"reads K/V of float32 only, not {need.kv_dtype}")
        if need.ancestors:
            reasons.append("does not verify trees")
        if need.score_mass:
            reasons.append("does not report score mass")
        if need.page_size % SCORES:
            reasons.append(f"needs a page size that is a multiple of {SCORES}, not {need.page_size}")
        for layer in dict.fromkeys(need.layers):
            if layer.query_heads % layer.kv_heads:
                reasons.append(f"{layer.query_heads} query heads are no multiple of {layer.kv_heads} KV heads")
            if layer.head_size % HEAD_STEP:
                reasons.append(f"needs head sizes that are multiples of {HEAD_STEP} on this CPU, not {layer.head_size}")
        return reasons

    @classmethod
    def create(cls, need: AttentionNeed, options: Any) -> Self:
        return cls(need)

    @classmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Any) -> Sequence[KVLayout]:
        shape = (need.page_size, layer.kv_heads, layer.head_size)
        tensors = tuple(TensorSpec(name=name, shape=shape, dtype=need.kv_dtype) for name in ("k", "v"))
        return (KVLayout(name="nhd", tensors=tensors),)

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> NumbaPlan:
        bounds = rows.bounds
        reach = bounds.max_kv if layer.window is None else min(bounds.max_kv, layer.window)
        products = bounds.tokens * layer.query_heads * layer.head_size * reach
        threads = max(1, min(torch.get_num_threads(), products // _ENOUGH))
        if self._scratch.shape[0] < threads:
            self._scratch = torch.empty(threads, self._numbers, dtype=torch.float32, device="cpu")
        return NumbaPlan(threads=threads, rows=rows, layer=layer)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        plan: NumbaPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        rows, layer = plan.rows, plan.layer
        expected = (rows.bounds.tokens, layer.query_heads, layer.head_size)
        if q.dtype != torch.float32 or q.shape != expected:
            raise PegboardError(f"q is {tuple(q.shape)} {q.dtype}; the plan is for {expected} torch.float32")
        if layer.sinks != (sinks is not None):
            raise PegboardError("the layer has sinks and none were given" if layer.sinks else "sinks without need")
        q = q.contiguous()
        sinks = None if sinks is None else sinks.contiguous()
        out = q.new_empty(expected)
        self._attend(
            plan.threads,
            rows.bounds.rows,
            layer.kv_heads,
            layer.query_heads // layer.kv_heads,
            layer.head_size,
            self._page_size,
            q.data_ptr(),
            out.data_ptr(),
            cache.tensors["k"].data_ptr(),
            cache.tensors["v"].data_ptr(),
            rows.query_start.data_ptr(),
            rows.kv_len.data_ptr(),
            rows.page_table.data_ptr(),
            4 * rows.page_table.stride(0),
            layer.window or 0,
            0 if sinks is None else sinks.data_ptr(),
            self._scratch.data_ptr(),
            self._numbers,
            layer.scale,
            layer.softcap or 0.0,
        )
        return out
