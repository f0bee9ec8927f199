"""The suite for ops: norm, projection, gated activation, embedding, rotation and the writes into the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, ClassVar, Final

import pytest
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
    no_synchronisation,
    normal,
    same_bits,
    unchanged,
)
from .oracles import ops as oracle
from .oracles import paged
from .oracles.ops import RowLinear, rope_tables

_PAGES: Final = 5
_PAGE_SIZE: Final = 16
#: Flat entries that tokens are written to: out of order, first and last of a page and of the cache.
_INDEX: Final = (16, 79, 3, 31, 40, 64)
_POSITIONS: Final = (0, 5, 5, 511, 1, 300)
#: Heads: query, KV.
_HEADS: Final = (3, 2)


class OpsSuite(Suite, standard=True):
    """Subclass it, set `part`, `device` and `dtypes`. Ops for another layout than those of `make_layout` override it,
    `read_cache` and `poison_cache`."""

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
            k = v = (_PAGE_SIZE, kv_heads, head_size)
        else:
            k, v = (kv_heads, _PAGE_SIZE, head_size), (kv_heads, head_size, _PAGE_SIZE)
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

    def cache_of(self, layout: KVLayout, pages: int = _PAGES) -> LayerCache:
        return paged.allocate(layout, pages, _PAGE_SIZE, self.device)

    def written_layout(self, ops: Ops, kv_heads: int, head_size: int, dtype: str) -> KVLayout:
        """The first layout without quantization that the ops write, or the first that they write."""
        for name in sorted(self.layouts, key=lambda name: "-" in name):
            layout = self.make_layout(name, kv_heads, head_size, dtype)
            if ops.writes(layout):
                return layout
        raise AssertionError(f"writes none of the layouts {', '.join(self.layouts)}")

    def index(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    # -- norm, activation, embedding

    def test_norm(self, candidate: Candidate, dtype: str, hidden_size: int) -> None:
        """All of offset, order of rounding and residual; two and three dimensions; an eps that counts."""
        ops = self.make(candidate, dtype, hidden_size=hidden_size)
        for shape, offset, first in product(((1,), (33,), (5, 3)), (0.0, 1.0), (True, False)):
            x = self.random(*shape, hidden_size, dtype=dtype)
            residual = self.random(*shape, hidden_size, dtype=dtype, seed=7)
            norm = self.norm_of(hidden_size, dtype, eps=0.1, offset=offset, round_first=first)
            expected, what = oracle.rms_norm(x, norm), f"norm of {tuple(x.shape)}, offset {offset}, round_first {first}"
            compare(ops.norm(x, norm), expected, _looser(dtype), what)
            compare(ops.norm(x, norm, residual), residual.double() + expected, _looser(dtype), f"{what}, residual")

    def test_norm_of_large_and_small_values(self, candidate: Candidate, dtype: str) -> None:
        """Squares that leave the range of float16."""
        ops, size = self.make(candidate, dtype), self.hidden_sizes[0]
        x = self.on(normal(4, size) * torch.tensor([[3000.0], [1e-3], [1.0], [300.0]]), dtype)
        norm = self.norm_of(size, dtype, eps=1e-6)
        compare(ops.norm(x, norm), oracle.rms_norm(x, norm), _looser(dtype), "norm of rows of very different size")

    def test_gated_activation(self, candidate: Candidate, dtype: str, activation: str) -> None:
        ops = self.make(candidate, dtype, activations=(activation,))
        for rows, width in ((1, 48), (33, 96), (5, 2 * 200)):
            x = self.on(normal(rows, width) * 3, dtype)
            found = ops.gated(x, activation)  # type: ignore[arg-type]
            compare(found, oracle.gated(x, activation), _looser(dtype), f"{activation} of {rows} x {width}")

    def test_embed(self, candidate: Candidate, dtype: str) -> None:
        ops, weight = self.make(candidate, dtype), self.random(9, 64, dtype=dtype)
        found = ops.embed(self.index((8, 0, 8, 3)), weight)
        check(same_bits(found, weight[[8, 0, 8, 3]]), "embed gave other rows than the ids name")

    # -- project

    @pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
    @pytest.mark.parametrize("count", [1, 7, 40])
    def test_project(self, candidate: Candidate, dtype: str, hidden_size: int, count: int, packed: bool) -> None:
        """residual + act(linear(norm(x))): every combination, with and without a bias, dense and packed linears, for
        numbers of rows that take different kernels."""
        activation, outputs = self.activations[0], 128 if self.grid == "small" else 256
        ops = self.make(candidate, dtype, hidden_size=hidden_size)
        x = self.random(count, hidden_size, dtype=dtype)
        norm = self.norm_of(hidden_size, dtype, offset=1.0, round_first=False)
        for normed, active, added, bias in product((False, True), repeat=4):
            linear = self.linear_of(hidden_size, outputs, dtype, bias=bias, packed=packed)
            residual = self.random(count, outputs // 2 if active else outputs, dtype=dtype, seed=9) if added else None
            out = linear.exact(oracle.rms_norm(x, norm) if normed else x)
            out = oracle.gated(out, activation) if active else out
            expected = out if residual is None else residual.double() + out
            found = ops.project(
                x,
                linear,
                norm=norm if normed else None,
                activation=activation if active else None,  # type: ignore[arg-type]
                residual=residual,
            )
            what = f"project with norm {normed}, activation {active}, residual {added}, bias {bias}"
            compare(found, expected, _looser(dtype, 4), what)

    def test_project_lets_a_linear_reduce(self, candidate: Candidate, dtype: str) -> None:
        """Of a linear split along its input the weight is a part: the linear must be called, and the residual added
        once, to the sum."""
        ops, size = self.make(candidate, dtype), self.hidden_sizes[0]
        linear = self.linear_of(size, size, dtype, bias=True, partition="input")
        x, residual = self.random(5, size, dtype=dtype), self.random(5, size, dtype=dtype, seed=9)
        found = ops.project(x, linear, residual=residual)
        compare(found, residual.double() + linear.exact(x), _looser(dtype, 4), "project of a linear that reduces")

    # -- rotation

    @pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
    def test_rope(self, candidate: Candidate, dtype: str, head_size: int, interleaved: bool) -> None:
        """Whole and partial rotation; positions that repeat and go back."""
        ops = self.make(candidate, dtype, head_sizes=(head_size,))
        for rotary in (head_size, head_size // 2):
            rope = self.tables(rotary, interleaved=interleaved)
            self.hold_rope(ops, dtype, head_size, rope, None, None, f"{rotary} of {head_size} dimensions turned")

    def test_without_rope_nothing_turns(self, candidate: Candidate, dtype: str) -> None:
        ops, size = self.make(candidate, dtype), self.head_sizes[0]
        qkv, cache = (
            self.qkv(dtype, size),
            self.cache_of(self.written_layout(self.make(candidate, dtype), 2, size, dtype)),
        )
        q, k, v = ops.rope_write(qkv, (*_HEADS, size), self.index(_POSITIONS), None, cache, self.index(_INDEX))
        source = qkv.view(len(_INDEX), -1, size)
        check(same_bits(q, source[:, :3]), "q is not that of qkv")
        check(k is None or same_bits(k, source[:, 3:5]), "k is not that of qkv")
        check(v is None or same_bits(v, source[:, 5:]), "v is not that of qkv")

    @pytest.mark.parametrize("which", ["q and k", "q", "k"])
    def test_q_and_k_norms_come_before_the_rotation(self, candidate: Candidate, dtype: str, which: str) -> None:
        ops, size = self.make(candidate, dtype), self.head_sizes[0]
        for facts in ({}, {"offset": 1.0, "round_first": False}):
            q_norm = self.norm_of(size, dtype, seed=5, **facts) if "q" in which else None
            k_norm = self.norm_of(size, dtype, seed=6, **facts) if "k" in which else None
            self.hold_rope(ops, dtype, size, self.tables(size), q_norm, k_norm, f"norms on {which}, {facts}")

    def tables(self, rotary: int, *, interleaved: bool = False) -> Rope:
        made = rope_tables(rotary, 512, interleaved=interleaved)
        return Rope(cos=made.cos.to(self.device), sin=made.sin.to(self.device), interleaved=interleaved)

    def qkv(self, dtype: str, size: int) -> Tensor:
        return self.random(len(_INDEX), (_HEADS[0] + 2 * _HEADS[1]) * size, dtype=dtype, seed=4)

    def turned(
        self, qkv: Tensor, size: int, rope: Rope | None, q_norm: Norm | None = None, k_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by the definition."""
        heads = qkv.double().view(qkv.shape[0], -1, size)
        q, k, v = heads.split_with_sizes([_HEADS[0], _HEADS[1], _HEADS[1]], dim=1)
        q, k = (x if norm is None else oracle.rms_norm(x, norm) for x, norm in ((q, q_norm), (k, k_norm)))
        if rope is not None:
            q, k = (oracle.rotate(x, self.index(_POSITIONS), rope) for x in (q, k))
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
        cache = self.cache_of(self.written_layout(ops, _HEADS[1], size, dtype))
        expected = self.turned(qkv.contiguous(), size, rope, q_norm, k_norm)
        positions, index = self.index(_POSITIONS), self.index(_INDEX)
        found = ops.rope_write(qkv, (*_HEADS, size), positions, rope, cache, index, q_norm, k_norm)
        for name, one, right in zip("qkv", found, expected, strict=True):
            if one is not None or name == "q":
                check(one is not None, "q is None")
                assert one is not None
                compare(one, right, _looser(dtype), f"{what}: {name}")

    # -- the cache

    def test_writes_a_layout(self, candidate: Candidate, dtype: str) -> None:
        """At least one that the suite knows, and all that are declared."""
        ops, size = self.make(candidate, dtype), self.head_sizes[0]
        self.written_layout(ops, 2, size, dtype)
        for name in self.layouts if self.is_declared("layouts") else ():
            check(ops.writes(self.make_layout(name, 2, size, dtype)), f"layout {name} is declared, and not written")

    def test_writes_where_write_index_says(self, candidate: Candidate, dtype: str, layout: str, head_size: int) -> None:
        """The rotated k and v, at the flat entries of `write_index`; every other entry keeps its bits."""
        ops = self.make(candidate, dtype, head_sizes=(head_size,))
        made = self.make_layout(layout, _HEADS[1], head_size, dtype)
        if not ops.writes(made):
            pytest.skip(f"does not write layout {layout}")
        cache, index = self.cache_of(made), self.index(_INDEX)
        self.poison_cache(cache, index)
        before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
        qkv, rope = self.qkv(dtype, head_size), self.tables(head_size)
        ops.rope_write(qkv, (*_HEADS, head_size), self.index(_POSITIONS), rope, cache, index)
        _, k, v = self.turned(qkv, head_size, rope)
        for name, right, found in zip("kv", (k, v), self.read_cache(cache, index), strict=True):
            tolerance, right = _looser(dtype), right.cpu()
            error = self.write_error(cache, index, right, name)
            if error is None:
                compare(found, right, tolerance, f"the {name} written")
            else:
                room = error + tolerance.absolute + tolerance.relative * right.abs()
                compare((found - right) / room, torch.zeros_like(right), Tolerance(1.0, 0.0), f"the {name} quantized")
        written = torch.zeros(_PAGES * _PAGE_SIZE, dtype=torch.bool)
        written[index.cpu()] = True
        self.hold_untouched(cache, before, written)

    def hold_untouched(self, cache: LayerCache, before: Mapping[str, Tensor], written: Tensor) -> None:
        """Entries outside the mask `written` [pages * S] have their old bits in every tensor."""
        entries = (~written).nonzero()[:, 0]
        for name, one, other in zip(
            cache.tensors, paged.raw_entries(cache, entries), paged.raw_entries(cache, entries, before), strict=True
        ):
            check(same_bits(one, other), f"{name} was written outside of write_index")

    def test_copy_pages(self, candidate: Candidate, dtype: str, layout: str) -> None:
        ops = self.make(candidate, dtype)
        cache = self.filled(ops, layout, dtype)
        before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
        ops.copy_pages(cache, self.index((3, 0)), self.index((1, 2)))
        for name, tensor in cache.tensors.items():
            check(same_bits(tensor, _pages(before[name], (0, 3, 0, 3, 4))), f"{name} after pages 3, 0 -> 1, 2 is wrong")

    def test_move_entries(self, candidate: Candidate, dtype: str, layout: str) -> None:
        """Overlapping: all sources are read before any target is written."""
        ops = self.make(candidate, dtype)
        cache = self.filled(ops, layout, dtype)
        source, target = (5, 6, 40, 7, 70), (4, 5, 6, 63, 5 + 64)
        order = list(range(_PAGES * _PAGE_SIZE))
        for one, other in zip(source, target, strict=True):
            order[other] = one
        expected = self.read_cache(cache, torch.tensor(order))
        ops.move_entries(cache, self.index(source), self.index(target))
        found = self.read_cache(cache, torch.arange(len(order)))
        for name, new, right in zip("kv", found, expected, strict=True):
            check(same_bits(new, right), f"{name}: entries {source} were not moved to {target} as they were before")

    def filled(self, ops: Ops, layout: str, dtype: str) -> LayerCache:
        made = self.make_layout(layout, _HEADS[1], self.head_sizes[0], dtype)
        if not ops.writes(made):
            pytest.skip(f"does not write layout {layout}")
        cache = self.cache_of(made)
        paged.fill_entries(cache, 1)
        return cache

    def test_entries_past_two_to_the_31(self, candidate: Candidate, dtype: str) -> None:
        """The offset of an element in a large cache does not fit 32 bits. Skipped where memory is short."""
        if self.grid == "small":
            pytest.skip("an interpreter would copy the whole cache")
        heads, size = (1, 8), self.head_sizes[-1]
        ops = self.make(candidate, dtype, head_sizes=(size,))
        layout = self.written_layout(ops, heads[1], size, dtype)
        page = _PAGE_SIZE * heads[1] * size
        pages = (1 << 31) // page + 2
        needed = 2 * pages * page * torch_dtype(dtype).itemsize
        free = self.facts().free_bytes
        if free < needed * 9 // 8:
            pytest.skip(f"needs {needed} bytes, {free} are free")
        if {spec.name for spec in layout.tensors} != {"k", "v"}:
            pytest.skip(f"layout {layout.name!r} has tensors that would have to grow, too")
        shape, kind = (pages, *layout.tensors[0].shape), torch_dtype(dtype)
        try:  # pages that are not touched cost nothing on a CPU
            tensors = {name: torch.empty(shape, dtype=kind, device=self.device) for name in ("k", "v")}
        except RuntimeError as error:
            pytest.skip(f"{needed} bytes could not be had: {error}")
        for tensor in tensors.values():
            tensor[:2] = 0
        cache = LayerCache(layout=layout, group=0, page_size=_PAGE_SIZE, tensors=tensors)
        index = self.index(((pages - 2) * _PAGE_SIZE + 3, pages * _PAGE_SIZE - 1))
        qkv = self.random(2, (heads[0] + 2 * heads[1]) * size, dtype=dtype)
        ops.rope_write(qkv, (*heads, size), self.index((0, 1)), None, cache, index)
        expected = qkv.view(2, -1, size).cpu().double()
        for name, found, first in zip("kv", self.read_cache(cache, index), (1, 9), strict=True):
            compare(found, expected[:, first : first + 8], _looser(dtype), f"{name} past 2^31 elements")
            check(not tensors[name][:2].any(), f"{name}: entries at the start of the cache were written")

    # -- rows, inputs and results

    def test_inputs_are_not_changed(self, candidate: Candidate, dtype: str) -> None:
        ops, size, head = self.make(candidate, dtype), self.hidden_sizes[0], self.head_sizes[0]
        x, residual = self.random(5, size, dtype=dtype), self.random(5, size, dtype=dtype, seed=3)
        norm, linear = self.norm_of(size, dtype), self.linear_of(size, size, dtype, bias=True)
        wide = self.linear_of(size, 2 * size, dtype)
        weights = {"norm weight": norm.weight, "weight": linear.weight, "bias": linear.bias, "wide weight": wide.weight}
        with unchanged(x=x, residual=residual, **weights):
            ops.norm(x, norm)
            ops.norm(x, norm, residual)
            ops.project(x, linear)
            ops.project(x, linear, norm=norm, residual=residual)
            ops.project(x, wide, norm=norm, activation=self.activations[0], residual=residual)  # type: ignore[arg-type]
            ops.gated(x, self.activations[0])  # type: ignore[arg-type]
            ops.embed(self.index((0, 1)), x)
        cache = self.cache_of(self.written_layout(ops, _HEADS[1], head, dtype))
        qkv, rope, head_norm = self.qkv(dtype, head), self.tables(head), self.norm_of(head, dtype)
        positions, index = self.index(_POSITIONS), self.index(_INDEX)
        tensors = {"qkv": qkv, "positions": positions, "write_index": index, "cos": rope.cos, "sin": rope.sin}
        for norms in ((None, None), (head_norm, head_norm)):
            with unchanged(**tensors, norm_weight=head_norm.weight):
                ops.rope_write(qkv, (*_HEADS, head), positions, rope, cache, index, *norms)
        source, target = self.index((0, 1)), self.index((2, 3))
        with unchanged(source=source, target=target):
            ops.copy_pages(cache, source, target)
            ops.move_entries(cache, source, target)

    def test_results_have_the_dtype_of_x(self, candidate: Candidate, dtype: str) -> None:
        ops, size, head = self.make(candidate, dtype), self.hidden_sizes[0], self.head_sizes[0]
        x, kind = self.random(5, size, dtype=dtype), torch_dtype(dtype)
        cache = self.cache_of(self.written_layout(ops, _HEADS[1], head, dtype))
        turned = ops.rope_write(
            self.qkv(dtype, head), (*_HEADS, head), self.index(_POSITIONS), self.tables(head), cache, self.index(_INDEX)
        )
        linear = self.linear_of(size, size, dtype)
        results = {
            "norm": ops.norm(x, self.norm_of(size, dtype)),
            "project": ops.project(x, linear, residual=x),
            "gated": ops.gated(x, self.activations[0]),  # type: ignore[arg-type]
            "embed": ops.embed(self.index((0,)), x),
            **{f"rope_write {name}": tensor for name, tensor in zip("qkv", turned, strict=True) if tensor is not None},
        }
        wrong = {name: str(tensor.dtype) for name, tensor in results.items() if tensor.dtype != kind}
        check(not wrong, f"x is {kind}, results are {wrong}")

    def test_strided_inputs(self, candidate: Candidate, dtype: str) -> None:
        """Rows of a wider tensor, as slices of a step's tokens or of a fused projection are."""
        ops, size, head = self.make(candidate, dtype), self.hidden_sizes[0], self.head_sizes[0]
        wide = self.random(10, 3 * size, dtype=dtype)
        x, norm = wide[::2, size : 2 * size], self.norm_of(size, dtype)
        compare(ops.norm(x, norm), oracle.rms_norm(x, norm), _looser(dtype), "norm of a strided x")
        name = self.activations[0]
        found = ops.gated(x, name)  # type: ignore[arg-type]
        compare(found, oracle.gated(x, name), _looser(dtype), f"{name} of a strided x")
        qkv = self.qkv(dtype, head)
        rows = torch.cat([torch.full_like(qkv, torch.nan), qkv], dim=1)[:, qkv.shape[1] :]
        self.hold_rope(ops, dtype, head, self.tables(head), None, None, "a strided qkv", rows)

    def test_a_broken_row_stays_alone(self, candidate: Candidate, dtype: str) -> None:
        """NaN in one token's x must not reach the others."""
        ops, size = self.make(candidate, dtype), self.hidden_sizes[0]
        x = self.random(5, size, dtype=dtype)
        x[1] = torch.nan
        norm, linear = self.norm_of(size, dtype), self.linear_of(size, size, dtype)
        for name, found in (
            ("norm", ops.norm(x, norm)),
            ("project", ops.project(x, linear, norm=norm)),
            ("gated", ops.gated(x, self.activations[0])),  # type: ignore[arg-type]
        ):
            check(bool(found[[0, 2, 3, 4]].isfinite().all()), f"{name}: a row of NaN reached its neighbours")

    def test_batch_invariant(self, candidate: Candidate, dtype: str) -> None:
        """When the need asks for it: a row's bits do not depend on how many there are."""
        ops, size, head = self.make(candidate, dtype, batch_invariant=True), self.hidden_sizes[0], self.head_sizes[0]
        x, norm = self.random(70, size, dtype=dtype), self.norm_of(size, dtype)
        linear, name = self.linear_of(size, size, dtype), self.activations[0]
        layout = self.written_layout(ops, 1, head, dtype)
        rope = self.tables(head)

        def turn(rows: Tensor) -> Tensor:
            qkv = rows.repeat(1, -(-3 * head // size))[:, : 3 * head]
            positions = self.index([7] * rows.shape[0])
            index = self.index(range(rows.shape[0]))
            return ops.rope_write(qkv, (1, 1, head), positions, rope, self.cache_of(layout), index)[0]

        for what, op in (
            ("norm", lambda rows: ops.norm(rows, norm, rows)),
            ("project", lambda rows: ops.project(rows, linear, norm=norm, residual=rows)),
            ("gated", lambda rows: ops.gated(rows, name)),  # type: ignore[arg-type]
            ("rope_write", turn),
        ):
            together = op(x.clone())
            for start, stop in ((0, 1), (3, 4), (20, 37), (69, 70)):
                part = op(x[start:stop].clone())
                check(same_bits(part, together[start:stop]), f"{what}: rows {start} to {stop} alone gave other bits")

    def test_repeats_itself(self, candidate: Candidate, dtype: str) -> None:
        ops, size = self.make(candidate, dtype), self.hidden_sizes[0]
        x, norm, linear = self.random(33, size, dtype=dtype), self.norm_of(size, dtype), self.linear_of(size, 96, dtype)
        first, again = (
            (ops.norm(x, norm), ops.project(x, linear, norm=norm), ops.gated(x, self.activations[0]))  # type: ignore[arg-type]
            for _ in range(2)
        )
        check(all(map(same_bits, first, again)), "the same inputs gave other bits the second time")

    def test_does_not_synchronise(self, candidate: Candidate, dtype: str) -> None:
        if not self.device.startswith("cuda"):
            pytest.skip("a CPU has nothing to wait for")
        ops, size, head = self.make(candidate, dtype), self.hidden_sizes[0], self.head_sizes[0]
        x, norm = self.random(5, size, dtype=dtype), self.norm_of(size, dtype)
        weight = self.random(size, size, dtype=dtype)
        cache = self.cache_of(self.written_layout(ops, _HEADS[1], head, dtype))
        qkv, rope, ids = self.qkv(dtype, head), self.tables(head), self.index((0, 1))
        positions, index, others = self.index(_POSITIONS), self.index(_INDEX), self.index((2, 3))

        def everything() -> None:
            ops.norm(x, norm, x)
            ops.gated(x, self.activations[0])  # type: ignore[arg-type]
            ops.embed(ids, weight)
            ops.rope_write(qkv, (*_HEADS, head), positions, rope, cache, index)
            ops.copy_pages(cache, ids, others)
            ops.move_entries(cache, ids, others)

        everything()  # kernels are compiled
        with no_synchronisation(self.device):
            everything()


def _looser(dtype: str, factor: float = 2.0) -> Tolerance:
    """For several roundings in a row (norm, weight, residual) and values above 1."""
    tolerance = TOLERANCES[dtype]
    return Tolerance(factor * tolerance.absolute, factor * tolerance.relative)


def _pages(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    return tensor.view(torch.uint8)[list(order)].view(tensor.dtype)
