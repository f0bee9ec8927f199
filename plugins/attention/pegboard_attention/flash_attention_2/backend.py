"""The attention part `flash_attention_2`: prefill over paged K/V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import triton
from torch import Tensor

from pegboard.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionNeed,
    KVLayout,
    LayerCache,
    TextAttention,
)
from pegboard.contracts.batch import Bounds, Rows
from pegboard.contracts.device import DeviceFacts, TensorSpec
from pegboard.dtypes import torch_dtype
from pegboard.errors import PegboardError

from ..quantized_kv import STORED, quantized_layout
from ..widening import format_of
from .autograd import flash_attention
from .options import FlashAttention2Options, KernelName
from .paths import Path, choose_path, hopper_refusals
from .problem import Entries, Forward, Mixing
from .schedule import Part, Schedule, make_schedule
from .unpacking import Room, make_rooms, workspace_entries

DTYPES = ("bfloat16", "float16")
#: Under Triton's interpreter, which serves tests on CPUs; its bfloat16 products are wrong.
INTERPRETED_DTYPES = ("float32", "float16")
MAX_HEAD_SIZE = 256
MIN_PAGE_SIZE = 16
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Pass:
    """Some rows' tiles, and the kernel that takes them."""

    path: Path
    schedule: Schedule
    #: Where quantized K/V are unpacked for the kernel; None: it reads them as they are.
    room: Room | None


@dataclass(frozen=True)
class FlashPlan:
    """A step's tiles for one kind of layer."""

    bounds: Bounds
    mixing: Mixing
    page_table: Tensor
    sinks: bool
    passes: tuple[Pass, ...]


class FlashAttention2(AttentionBackend[FlashPlan]):
    """Exact attention for rows of many queries: tiles with an online softmax, K/V read page by page where they lie.

    Dao, 2023 (arXiv 2307.08691). Softmax and sums in float32. Rows may be ragged, have a prefix in the cache, windows,
    soft caps and sinks; tiles are scheduled on the device from true lengths.

    Eight-bit K/V are dequantized by the portable kernel in its tiles (K exactly, V rounded to the compute dtype), or in
    a workspace before the Hopper kernel (both rounded, see `unpacking`). Which of the two runs depends on the batch, so
    in batch-invariant mode it is the first. Else what a row gives does not depend on its neighbours, bit for bit.
    """

    capturable = True

    def __init__(self, need: AttentionNeed, kernel: KernelName) -> None:
        self._need = need
        self._dtype = torch_dtype(need.dtype)
        self._kernel = kernel
        capability = need.device.capability
        interpreted = triton.knobs.runtime.interpret
        self._format = format_of(need.kv_dtype, hopper=not interpreted and (capability or (0, 0)) >= (9, 0))

    @classmethod
    def refusals(cls, need: AttentionNeed, options: Any) -> Sequence[str]:
        reasons = _device_refusals(need.device)
        if need.device.type == "cuda" or not reasons:
            reasons += _dtype_refusals(need.dtype)
        if need.kv_dtype != need.dtype and need.kv_dtype not in STORED:
            reasons.append(f"reads K/V in {need.dtype}, {' or '.join(STORED)}, not in {need.kv_dtype}")
        if need.page_size < MIN_PAGE_SIZE or need.page_size & (need.page_size - 1):
            reasons.append(f"reads pages of a power of two of at least {MIN_PAGE_SIZE} entries, not {need.page_size}")
        if need.phase != "prefill":
            reasons.append("serves prefill: a decode step has one tile a row, which leaves most of the device idle")
        if need.ancestors:
            reasons.append("has no ancestor masks")
        if need.score_mass:
            reasons.append("does not report score mass")
        kernel = _options(options).kernel
        if kernel == "hopper" and need.kv_dtype in STORED:
            reasons.append(
                f"the Hopper kernel reads no K/V in {need.kv_dtype}: with kernel = 'auto' they are unpacked for it"
            )
        for layer in dict.fromkeys(need.layers):
            reasons.extend(_layer_refusals(layer))
            if kernel == "hopper":
                reasons.extend(hopper_refusals(need.device.capability, need.dtype, layer.head_size))
        return list(dict.fromkeys(reasons))

    @classmethod
    def create(cls, need: AttentionNeed, options: Any) -> Self:
        return cls(need, _options(options).kernel)

    @classmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Any) -> Sequence[KVLayout]:
        if need.kv_dtype in STORED:
            return (quantized_layout(layer, need.page_size, need.kv_dtype),)
        shape = (need.page_size, layer.kv_heads, layer.head_size)
        tensors = tuple(TensorSpec(name=name, shape=shape, dtype=need.kv_dtype) for name in ("k", "v"))
        return (KVLayout(name="nhd", tensors=tensors),)

    @classmethod
    def differentiable(cls, device: DeviceFacts, layer: AttentionLayer) -> TextAttention | None:
        """On CUDA in bfloat16."""
        if layer.sinks or _device_refusals(device) or _layer_refusals(layer):
            return None
        return partial(_attend_texts, layer=layer)

    def workspace(self) -> Sequence[TensorSpec]:
        """Room for unpacked K/V of all rows, up to `unpacking.MOST_ENTRIES`."""
        need = self._need
        layers = [layer for layer in dict.fromkeys(need.layers) if self._unpacks(layer)]
        if not layers:
            return ()
        entries = workspace_entries(need.max_rows, need.max_length, need.page_size)
        shape = (entries * max(layer.kv_heads * layer.head_size for layer in layers),)
        return tuple(TensorSpec(name=name, shape=shape, dtype=need.dtype) for name in ("unpacked_k", "unpacked_v"))

    def _unpacks(self, layer: AttentionLayer) -> bool:
        """Whether eight-bit K/V may be unpacked for the Hopper kernel."""
        need = self._need
        able = self._format != 0 and self._kernel == "auto" and not need.batch_invariant
        return able and not hopper_refusals(need.device.capability, need.dtype, layer.head_size)

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> FlashPlan:
        mixing = Mixing(
            query_heads=layer.query_heads,
            kv_heads=layer.kv_heads,
            head_size=layer.head_size,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
        )
        rooms: list[Room] = []
        if self._unpacks(layer):
            rooms = make_rooms(rows, mixing, self._need.page_size, workspace["unpacked_k"], workspace["unpacked_v"])
        passes = [self._pass("hopper", rows, mixing, room.part, room) for room in rooms]
        if not rooms:
            kernel = "portable" if self._format else self._kernel
            passes.append(self._pass(kernel, rows, mixing, Part(0, rows.bounds.rows)))
        elif rows.bounds.max_kv > rooms[0].stride:
            passes.append(self._pass("portable", rows, mixing, Part(0, rows.bounds.rows, above=rooms[0].stride)))
        return FlashPlan(rows.bounds, mixing, rows.page_table, layer.sinks, tuple(passes))

    def _pass(self, kernel: KernelName, rows: Rows, mixing: Mixing, part: Part, room: Room | None = None) -> Pass:
        path = choose_path(kernel, self._need.device.capability, self._need.dtype, mixing.head_size)
        tiling = path.tiling
        schedule = make_schedule(
            rows.query_start,
            rows.kv_len,
            tokens=rows.bounds.tokens,
            max_query=rows.bounds.max_query,
            tile_tokens=tiling.rows // mixing.packed_heads(tiling.rows),
            block=tiling.block,
            window=mixing.window,
            part=part,
        )
        return Pass(path, schedule, room)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        plan: FlashPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        expected = (plan.bounds.tokens, plan.mixing.query_heads, plan.mixing.head_size)
        if q.dtype != self._dtype or q.shape != expected:
            raise PegboardError(f"q is {tuple(q.shape)} {q.dtype}; the plan is for {expected} {self._dtype}")
        if plan.sinks != (sinks is not None):
            raise PegboardError("the layer has sinks and none were given" if plan.sinks else "sinks without need")
        entries = _entries(cache, plan.page_table, self._format)
        out = torch.empty(expected, dtype=q.dtype, device=q.device)
        for each in plan.passes:
            seen = entries if each.room is None else each.room.fill(entries, plan.mixing)
            each.path.launch(Forward(q, seen, each.schedule, plan.mixing, each.path.tiling, out, sinks=sinks))
        return out


def _entries(cache: LayerCache, table: Tensor, form: int) -> Entries:
    k, v = cache.tensors["k"], cache.tensors["v"]
    if not form:
        return Entries(k, v, table=table)
    k, v = (x.view(torch.uint8) for x in (k, v))  # kernels widen eight-bit formats themselves
    k_scale, v_scale = (cache.tensors[name].transpose(1, 2) for name in ("k_scale", "v_scale"))
    turned = v.permute(0, 3, 1, 2)
    return Entries(k.transpose(1, 2), turned, table=table, k_scale=k_scale, v_scale=v_scale, format=form)


def _options(options: Any) -> FlashAttention2Options:
    return FlashAttention2Options() if options is None else options


def _attend_texts(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, *, layer: AttentionLayer) -> Tensor:
    dtype = q.dtype if triton.knobs.runtime.interpret else torch.bfloat16
    out, _ = flash_attention(
        *(x.to(dtype) for x in (q, k, v)),
        window=layer.window,
        softcap=layer.softcap,
        scale=layer.scale,
        query_start=starts,
        kv_start=starts,
        max_query=longest,
        max_kv=longest,
    )
    return out.to(q.dtype)


def _device_refusals(device: DeviceFacts) -> list[str]:
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return [f"runs on CUDA devices, not on {device.type}"]
    if device.capability is not None and device.capability < MIN_CAPABILITY:
        return [f"needs compute capability 8.0 or later, not {device.capability[0]}.{device.capability[1]}"]
    return []


def _dtype_refusals(dtype: str) -> list[str]:
    dtypes = INTERPRETED_DTYPES if triton.knobs.runtime.interpret else DTYPES
    return [] if dtype in dtypes else [f"computes in {' and '.join(dtypes)}, not in {dtype}"]


def _layer_refusals(layer: AttentionLayer) -> list[str]:
    reasons = []
    if layer.query_heads % layer.kv_heads:
        reasons.append(f"{layer.query_heads} query heads are no multiple of {layer.kv_heads} KV heads")
    if layer.head_size > MAX_HEAD_SIZE or layer.head_size % 8:
        reasons.append(f"takes head sizes that are multiples of 8 up to {MAX_HEAD_SIZE}, not {layer.head_size}")
    if layer.scale <= 0:
        reasons.append(f"takes scales above 0, not {layer.scale}")
    return reasons
