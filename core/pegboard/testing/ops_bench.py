"""Inputs for ops to be tried on, and what they must give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from ..contracts.attention import KVLayout, LayerCache
from ..contracts.device import TensorSpec
from ..contracts.ops import Norm, Ops, OpsNeed, Rope
from ..dtypes import torch_dtype
from .conformance import (
    TOLERANCES,
    Candidate,
    Suite,
    Tolerance,
    check,
    compare,
    normal,
)
from .oracles import ops as oracle
from .oracles import paged
from .oracles.ops import RowLinear, rope_tables

PAGES: Final = 5
PAGE_SIZE: Final = 16
#: Flat entries that tokens are written to: out of order, first and last of a page and of the cache.
INDEX: Final = (16, 79, 3, 31, 40, 64)
POSITIONS: Final = (0, 5, 5, 511, 1, 300)
#: Heads: query, KV.
HEADS: Final = (3, 2)


class OpsBench(Suite, standard=True):
    """What the tests of `OpsSuite` work with."""

    role = "ops"
    features = ("batch_invariant",)
    axes: ClassVar[Mapping[str, str]] = {
        "dtype": "dtypes",
        "head_size": "head_sizes",
        "activation": "activations",
        "layout": "layouts",
        "hidden_size": "hidden_sizes",
    }
    head_sizes: ClassVar[tuple[int, ...]] = (64, 72, 80, 96, 128, 256)
    hidden_sizes: ClassVar[tuple[int, ...]] = (64, 96, 576)
    activations: ClassVar[tuple[str, ...]] = ("silu", "gelu_tanh", "gelu")
    #: At least one must be written. See `make_layout`.
    layouts: ClassVar[tuple[str, ...]] = ("nhd", "hnd", "hnd-int8", "hnd-float8_e4m3fn")

    # -- what ops are given

    @classmethod
    def need(cls, dtype: str, **changes: Any) -> OpsNeed:
        fields: dict[str, Any] = {
            "device": cls.facts(),
            "dtype": dtype,
            "hidden_size": cls.hidden_sizes[0],
            "head_sizes": cls.head_sizes[:1],
            "activations": cls.activations[:1],
        }
        return OpsNeed(**(fields | changes))

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, OpsNeed]]:
        for dtype in cls.dtypes:
            yield f"dtype {dtype}", cls.need(dtype)
        for size in cls.head_sizes if cls.is_declared("head_sizes") else ():
            yield f"head size {size}", cls.need(cls.dtypes[0], head_sizes=(size,))
        for name in cls.activations if cls.is_declared("activations") else ():
            yield f"activation {name}", cls.need(cls.dtypes[0], activations=(name,))
        for claim in cls.claims:
            yield f"claim {claim}", cls.need(cls.dtypes[0], **{claim: True})

    def make_layout(self, name: str, kv_heads: int, head_size: int, dtype: str) -> KVLayout:
        """The layout of a name in `layouts`, pages of 16 entries: plain K and V in either order, or quantized ones with
        V turned and a scale a token and head."""
        order, _, quantized = name.partition("-")
        if order == "nhd":
            k = v = (PAGE_SIZE, kv_heads, head_size)
        else:
            k, v = (kv_heads, PAGE_SIZE, head_size), (kv_heads, head_size, PAGE_SIZE)
        stored = {"": dtype, "int8": "uint8"}.get(quantized, quantized)
        shapes = {"k": k, "v": v if quantized else k}
        tensors = [TensorSpec(name=x, shape=shape, dtype=stored) for x, shape in shapes.items()]
        if quantized:
            tensors += [TensorSpec(name=f"{x}_scale", shape=k[:2], dtype="float32") for x in shapes]
        return KVLayout(name=name, tensors=tuple(tensors))

    def read_cache(self, cache: LayerCache, entries: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of flat entries [N]: float64 [N, K, D] on the CPU, as the cache means them."""
        return paged.read_entries(cache, entries)

    def poison_cache(self, cache: LayerCache, keep: Tensor) -> None:
        """Make every entry NaN but the flat entries `keep` [N]."""
        paged.poison_entries(cache, keep)

    def write_error(self, cache: LayerCache, entries: Tensor, expected: Tensor, name: str) -> Tensor | None:
        """How far a quantized entry may be from `expected` [N, K, D]: half a step of int8 by the scale written, half a
        unit in the last place of float8. None for a cache that is not quantized."""
        scale = paged.read_scales(cache, entries, name)
        if scale is None:
            return None
        if not cache.tensors[name].dtype.is_floating_point:
            return scale.abs() * 0.5
        return torch.maximum(expected.abs() / 16, scale.abs() * 2.0**-10)

    def make(self, candidate: Candidate, dtype: str, **changes: Any) -> Ops:
        ops: Ops = candidate.create(self.need(dtype, **changes))
        return ops

    def on(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor on the device, rounded to a dtype."""
        return tensor.to(self.device, torch_dtype(dtype))

    def random(self, *shape: int, dtype: str, seed: int = 0) -> Tensor:
        return self.on(normal(*shape, seed=seed), dtype)

    def norm_of(self, size: int, dtype: str, seed: int = 1, **facts: Any) -> Norm:
        return Norm(weight=self.random(size, dtype=dtype, seed=seed), **({"eps": 1e-5} | facts))

    def linear_of(self, inputs: int, outputs: int, dtype: str, *, bias: bool = False, **facts: Any) -> RowLinear:
        weight = self.on(normal(outputs, inputs, seed=2) / inputs**0.5, dtype)
        return RowLinear(weight, self.random(outputs, dtype=dtype, seed=3) if bias else None, **facts)

    def cache_of(self, layout: KVLayout, pages: int = PAGES) -> LayerCache:
        return paged.allocate(layout, pages, PAGE_SIZE, self.device)

    def written_layout(self, ops: Ops, kv_heads: int, head_size: int, dtype: str) -> KVLayout:
        """The first layout without quantization that the ops write, or the first that they write."""
        for name in sorted(self.layouts, key=lambda name: "-" in name):
            layout = self.make_layout(name, kv_heads, head_size, dtype)
            if ops.writes(layout):
                return layout
        raise AssertionError(f"writes none of the layouts {', '.join(self.layouts)}")

    def index(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    def tables(self, rotary: int, *, interleaved: bool = False) -> Rope:
        made = rope_tables(rotary, 512, interleaved=interleaved)
        return Rope(cos=made.cos.to(self.device), sin=made.sin.to(self.device), interleaved=interleaved)

    def qkv(self, dtype: str, size: int) -> Tensor:
        return self.random(len(INDEX), (HEADS[0] + 2 * HEADS[1]) * size, dtype=dtype, seed=4)

    def turned(
        self, qkv: Tensor, size: int, rope: Rope | None, q_norm: Norm | None = None, k_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by the definition."""
        heads = qkv.double().view(qkv.shape[0], -1, size)
        q, k, v = heads.split_with_sizes([HEADS[0], HEADS[1], HEADS[1]], dim=1)
        q, k = (x if norm is None else oracle.rms_norm(x, norm) for x, norm in ((q, q_norm), (k, k_norm)))
        if rope is not None:
            q, k = (oracle.rotate(x, self.index(POSITIONS), rope) for x in (q, k))
        return q, k, v

    def hold_rope(
        self,
        ops: Ops,
        dtype: str,
        size: int,
        rope: Rope | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        what: str,
        qkv: Tensor | None = None,
    ) -> None:
        qkv = self.qkv(dtype, size) if qkv is None else qkv
        cache = self.cache_of(self.written_layout(ops, HEADS[1], size, dtype))
        expected = self.turned(qkv.contiguous(), size, rope, q_norm, k_norm)
        positions, index = self.index(POSITIONS), self.index(INDEX)
        found = ops.rope_write(qkv, (*HEADS, size), positions, rope, cache, index, q_norm, k_norm)
        for name, one, right in zip("qkv", found, expected, strict=True):
            if one is not None or name == "q":
                check(one is not None, "q is None")
                assert one is not None
                compare(one, right, looser(dtype), f"{what}: {name}")


def looser(dtype: str, factor: float = 2.0) -> Tolerance:
    """For several roundings in a row (norm, weight, residual) and values above 1."""
    tolerance = TOLERANCES[dtype]
    return Tolerance(factor * tolerance.absolute, factor * tolerance.relative)
