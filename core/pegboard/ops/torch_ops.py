"""The ops in plain torch: complete on every device, and the oracle for every fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.attention import KVLayout, LayerCache
from ..contracts.ops import Activation, Located, Norm, Ops, OpsNeed, Rope, SlotTables
from ..contracts.quantizer import Linear
from ..dtypes import FLOAT_DTYPES
from ..errors import PegboardError

_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
}


class TorchOps(Ops):
    """Norms and rotations are computed in float32 (float64 for float64) and rounded to x's dtype as their records
    say. `rope_write` fills layouts of plain k and v in the "nhd" order."""

    @classmethod
    def refusals(cls, need: OpsNeed, options: Any) -> Sequence[str]:
        reasons = []
        if need.dtype not in FLOAT_DTYPES:
            reasons.append(f"computes in {', '.join(FLOAT_DTYPES)}, not in {need.dtype}")
        reasons.extend(
            f"has no gated activation {name!r}; it has {', '.join(_ACTIVATIONS)}"
            for name in need.activations
            if name not in _ACTIVATIONS
        )
        return reasons

    @classmethod
    def create(cls, need: OpsNeed, options: Any) -> Self:
        return cls()

    def writes(self, layout: KVLayout) -> bool:
        return (
            tuple(tensor.name for tensor in layout.tensors) == ("k", "v")
            and all(tensor.dtype in FLOAT_DTYPES and len(tensor.shape) == 3 for tensor in layout.tensors)
            and layout.name == "nhd"
        )

    def locate(self, slots: Tensor, advance: Tensor, tables: SlotTables, width: int) -> Located:
        size, columns, dropped = tables.page_size, tables.pages.shape[1], tables.dropped[slots]
        positions = tables.lengths[slots]
        entries, ends = positions - dropped, positions + advance
        page = tables.pages.view(-1)[slots * columns + entries // size].long()
        return Located(
            ids=tables.last_ids[slots],
            positions=positions,
            ends=ends,
            write_index=page * size + entries % size,
            kv_len=(ends - dropped).to(torch.int32),
            page_table=tables.pages[slots, :width],
        )

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        return functional.embedding(ids, weight)

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        if work == x.dtype and norm.offset == 0:
            # Nothing is rounded between the steps, so that they may be done in place
            factor = x.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
            out = (x * factor).mul_(norm.weight)
            return out if residual is None else out.add_(residual)
        wide = x.to(work)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        if norm.round_first:
            weight = norm.weight if norm.offset == 0 else norm.weight + norm.offset
            out = weight.to(x.dtype) * scaled.to(x.dtype)
        else:
            weight = norm.weight.to(work)
            out = (scaled * (weight if norm.offset == 0 else norm.offset + weight)).to(x.dtype)
        return out if residual is None else residual + out

    def project(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if norm is not None:
            x = self.norm(x, norm)
        out = linear(x)
        if activation is not None:
            out = self.gated(out, activation)
        return out if residual is None else out.add_(residual)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate).mul_(up)

    def rope_write(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        positions: Tensor,
        rope: Rope | None,
        cache: LayerCache,
        write_index: Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        check_width(qkv, heads)
        query_heads, kv_heads, size = heads
        by_head = qkv.view(-1, query_heads + 2 * kv_heads, size)
        if q_norm is None and k_norm is None:
            turned, v = by_head.split_with_sizes([query_heads + kv_heads, kv_heads], dim=1)
            turned = turned if rope is None else rotate(turned, positions, rope)
            q, k = turned.split_with_sizes([query_heads, kv_heads], dim=1)
        else:
            q, k, v = by_head.split_with_sizes([query_heads, kv_heads, kv_heads], dim=1)
            q, k = (x if norm is None else self.norm(x, norm) for x, norm in ((q, q_norm), (k, k_norm)))
            if rope is not None:
                q, k = rotate(q, positions, rope), rotate(k, positions, rope)
        for name, x in (("k", k), ("v", v)):
            entries = cache.tensors[name].flatten(0, 1)
            entries.index_copy_(0, write_index, x.to(entries.dtype))
        return q, k, v

    def copy_pages(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        for tensor in map(as_indexable, cache.tensors.values()):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def move_entries(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        for name, tensor in cache.tensors.items():
            if tensor.shape[1] != cache.page_size:
                raise PegboardError(
                    f"{name} of layout {cache.layout.name!r} has pages of {tuple(tensor.shape[1:])}: entries "
                    f"(page size {cache.page_size}) must come first to be moved"
                )
            entries = as_indexable(tensor).flatten(0, 1)
            entries.index_copy_(0, target, entries.index_select(0, source))


def check_width(qkv: Tensor, heads: tuple[int, int, int]) -> None:
    """PegboardError: qkv [T, F] is not as wide as heads (H, K, D) say."""
    query_heads, kv_heads, size = heads
    width = (query_heads + 2 * kv_heads) * size
    if qkv.shape[1] != width:
        raise PegboardError(
            f"qkv has {qkv.shape[1]} features; {query_heads} query and 2 x {kv_heads} KV heads of {size} have {width}"
        )


def as_indexable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes: torch doesn't write float8 by index on every device."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """x [T, heads, D] turned by positions [T], in float32 (float64 for float64); a new tensor in x's dtype."""
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.index_select(0, positions).to(work)[:, None] for table in (rope.cos, rope.sin))
    turning = 2 * cos.shape[-1]
    wide = x.to(work)
    rest = [] if turning == x.shape[-1] else [wide[..., turning:]]
    if rope.interleaved:
        a, b = wide[..., 0:turning:2], wide[..., 1:turning:2]
    else:
        a, b = wide[..., :turning].chunk(2, dim=-1)
    turned = [(a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)]
    if rope.interleaved:
        turned = [torch.stack(turned, dim=-1).flatten(-2)]
    return torch.cat(turned + rest, dim=-1).to(x.dtype)
