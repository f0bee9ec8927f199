"""FlashDecoding in Triton: attention of few queries a row over paged K/V, split over the whole device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, KVLayout, LayerCache
from pegboard.contracts.batch import Rows
from pegboard.contracts.device import TensorSpec
from pegboard.dtypes import torch_dtype
from pegboard.errors import PegboardError

from .flash_decoding_kernels import attend_items, merge_splits
from .flash_decoding_schedule import launch_schedule, most_items
from .flash_decoding_shapes import Shape, Shapes
from .quantized_kv import STORED, quantized_layout
from .widening import format_of

_DTYPES = ("float16", "bfloat16", "float32")
#: Queries of a row that fit the kernels' 64-bit ancestor masks.
_MAX_QUERY = 64
#: A batch that fills the device is not split while no row can have more entries: the slowest row then costs less than
#: a merge does.
_UNSPLIT_ENTRIES = 2048


@dataclass(frozen=True)
class DecodePlan:
    rows: Rows
    layer: AttentionLayer
    shape: Shape
    #: Most queries of a row; what no result may depend on in batch-invariant mode.
    max_query: int
    #: [items, 4] int32 and [R + 1] int32, see `schedule_items`; None: one item a row.
    items: Tensor | None
    first: Tensor | None
    partials: Tensor
    lse: Tensor


class FlashDecoding(AttentionBackend[DecodePlan]):
    """Rows of up to 64 queries, a chain or a tree. Each row's entries are split into as many spans as fill the device,
    chosen there from its true lengths; a second launch merges them without atomics, so results are deterministic.

    In batch-invariant mode spans have a fixed length, so a row's result doesn't depend on its neighbours, bit for bit.
    `multiprocessors`: how many the device has. `interpreted`: for Triton's interpreter, which knows neither assembly
    nor dependent launch."""

    capturable = True

    def __init__(self, need: AttentionNeed, *, multiprocessors: int, interpreted: bool = False) -> None:
        self._need = need
        self._dtype = torch_dtype(need.dtype)
        self._interpreted = interpreted
        self._hopper = not interpreted and (need.device.capability or (0, 0)) >= (9, 0)
        self._shapes = Shapes(need, multiprocessors, descriptors=self._hopper)
        self._format = format_of(need.kv_dtype, hopper=self._hopper)

    @classmethod
    def refusals(cls, need: AttentionNeed, options: Any) -> Sequence[str]:
        reasons = []
        if need.phase != "decode":
            reasons.append("serves decode rows only; prefill needs another backend")
        if need.device.type != "cuda" or (need.device.capability or (0, 0)) < (8, 0):
            found = need.device.type if need.device.capability is None else f"capability {need.device.capability}"
            reasons.append(f"needs a CUDA device of compute capability 8.0 or more, not {found}")
        if need.dtype not in _DTYPES:
            reasons.append(f"computes in {', '.join(_DTYPES)}, not in {need.dtype}")
        if need.kv_dtype != need.dtype and need.kv_dtype not in STORED:
            reasons.append(f"reads K/V in {need.dtype}, {' or '.join(STORED)}, not in {need.kv_dtype}")
        if need.max_query > _MAX_QUERY:
            reasons.append(f"serves rows of at most {_MAX_QUERY} queries, not {need.max_query}")
        if need.score_mass:
            reasons.append("does not report score mass")
        for layer in dict.fromkeys(need.layers):
            if layer.query_heads % layer.kv_heads:
                reasons.append(f"{layer.query_heads} query heads are no multiple of {layer.kv_heads} KV heads")
            if layer.head_size % 8 or not 16 <= layer.head_size <= 256:
                reasons.append(f"needs head sizes of 16 to 256 that are multiples of 8, not {layer.head_size}")
            if need.ancestors and layer.window is not None and layer.window < need.max_query:
                reasons.append(f"a window of {layer.window} entries is shorter than trees of {need.max_query} queries")
        return list(dict.fromkeys(reasons))

    @classmethod
    def create(cls, need: AttentionNeed, options: Any) -> Self:
        properties = torch.cuda.get_device_properties(need.device.index)
        return cls(need, multiprocessors=properties.multi_processor_count)

    @classmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Any) -> Sequence[KVLayout]:
        if need.kv_dtype in STORED:
            return (quantized_layout(layer, need.page_size, need.kv_dtype),)
        shape = (need.page_size, layer.kv_heads, layer.head_size)
        tensors = tuple(TensorSpec(name=name, shape=shape, dtype=need.kv_dtype) for name in ("k", "v"))
        return (KVLayout(name="nhd", tensors=tensors),)

    def workspace(self) -> Sequence[TensorSpec]:
        """Partial results of the items of the largest batch, for the layer that needs most."""
        layers = dict.fromkeys(self._need.layers)
        pairs = {layer: self._shapes.most_pairs(layer) for layer in layers}
        return (
            TensorSpec(name="lse", shape=(max(pairs.values(), default=0),), dtype="float32"),
            TensorSpec(
                name="partials", shape=(max((pairs[x] * x.head_size for x in layers), default=0),), dtype="float32"
            ),
        )

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> DecodePlan:
        bounds = rows.bounds
        widest = self._need.max_query if self._need.batch_invariant else bounds.max_query
        shape = self._shapes.shape(layer, widest)
        fixed, longest = shape.fixed_tiles, bounds.max_kv
        if layer.window is not None:
            longest = min(longest, layer.window + widest + shape.block_n)
        tiles = max(1, -(-longest // shape.block_n))
        items = first = None
        unsplit = longest <= _UNSPLIT_ENTRIES and shape.fills_device(bounds.rows)
        if tiles > fixed if fixed else tiles > 1 and not unsplit:
            device = rows.kv_len.device
            count = most_items(bounds.rows, shape.slots, tiles, fixed)
            items = torch.empty(count, 4, dtype=torch.int32, device=device)
            first = torch.empty(bounds.rows + 1, dtype=torch.int32, device=device)
            launch_schedule(
                rows.kv_len,
                rows.query_start,
                items,
                first,
                slots=shape.slots,
                window=layer.window,
                fixed_tiles=fixed,
                block_n=shape.block_n,
            )
        if not fixed and bounds.rows * tiles <= shape.slots:
            shape = self._shapes.shape(layer, widest, lone_tiles=True)
        return DecodePlan(
            rows=rows,
            layer=layer,
            shape=shape,
            max_query=widest,
            items=items,
            first=first,
            partials=workspace["partials"],
            lse=workspace["lse"],
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        plan: DecodePlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        layer, rows, shape, bounds = plan.layer, plan.rows, plan.shape, plan.rows.bounds
        expected = (bounds.tokens, layer.query_heads, layer.head_size)
        if q.dtype != self._dtype or q.shape != expected or q.stride(2) != 1:
            raise PegboardError(
                f"q is {tuple(q.shape)} {q.dtype}, strides {q.stride()}; the plan is for {expected} {self._dtype} with "
                "dense heads"
            )
        if layer.sinks != (sinks is not None):
            raise PegboardError("the layer has sinks and none were given" if layer.sinks else "sinks without need")
        out = torch.empty(expected, dtype=q.dtype, device=q.device)
        keys, values = cache.tensors["k"], cache.tensors["v"]
        quantized = self._need.kv_dtype in STORED
        tiles = self._descriptors(keys, values, layer, shape) if shape.tma else (_bytes(keys), _bytes(values))
        pdl = {"launch_pdl": True} if self._hopper else {}
        groups = layer.query_heads // layer.kv_heads
        items = bounds.rows if plan.items is None else plan.items.shape[0]
        attend_items[(layer.kv_heads * shape.query_blocks, items)](
            q,
            *tiles,
            cache.tensors["k_scale"] if quantized else None,
            cache.tensors["v_scale"] if quantized else None,
            rows.page_table,
            plan.items,
            rows.kv_len,
            rows.query_start,
            rows.ancestors,
            sinks,
            out,
            plan.partials,
            plan.lse,
            q.stride(0),
            q.stride(1),
            rows.page_table.stride(0),
            rows.page_table.shape[1],
            layer.scale,
            layer.softcap or 0.0,
            layer.window or 0,
            shape.part_rows,
            K_HEADS=layer.kv_heads,
            G=groups,
            D=layer.head_size,
            BLOCK_D=shape.block_d,
            PAGE=cache.page_size,
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            QUERY_BLOCKS=shape.query_blocks,
            MANY=plan.max_query > 1,
            TREE=rows.ancestors is not None,
            WINDOW=layer.window is not None,
            SOFTCAP=layer.softcap is not None,
            SINKS=layer.sinks,
            FORMAT=self._format,
            ASSEMBLY=not self._interpreted,
            TMA=shape.tma,
            SPLIT=plan.items is not None,
            PDL=self._hopper,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **pdl,
        )
        if plan.items is not None:
            merge_splits[(layer.query_heads, bounds.rows * plan.max_query)](
                plan.partials,
                plan.lse,
                plan.first,
                rows.query_start,
                sinks,
                out,
                shape.part_rows,
                K_HEADS=layer.kv_heads,
                G=groups,
                D=layer.head_size,
                BLOCK_D=shape.block_d,
                BLOCK_M=shape.block_m,
                QUERY_BLOCKS=shape.query_blocks,
                MAX_QUERY=plan.max_query,
                SPLITS=32,
                SINKS=layer.sinks,
                PDL=self._hopper,
                num_warps=4,
                **pdl,
            )
        return out

    def _descriptors(
        self, keys: Tensor, values: Tensor, layer: AttentionLayer, shape: Shape
    ) -> tuple[TensorDescriptor, TensorDescriptor]:
        """K and V as matrices whose tiles are [BLOCK_N, D], or [D, BLOCK_N] for quantized V."""
        size, row = layer.head_size, [shape.block_n, layer.head_size]
        if self._need.kv_dtype not in STORED:
            return _matrix(keys, layer.kv_heads * size, row), _matrix(values, layer.kv_heads * size, row)
        return _matrix(_bytes(keys), size, row), _matrix(_bytes(values), values.shape[3], row[::-1])


def _matrix(tensor: Tensor, columns: int, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, [tensor.numel() // columns, columns], [columns, 1], block)


def _bytes(tensor: Tensor) -> Tensor:
    """The kernels widen eight-bit formats themselves."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
