"""The part of the suite for ops that turns and writes: rotation, the cache, copies and moves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from ..contracts.attention import LayerCache
from ..contracts.ops import Ops
from ..dtypes import torch_dtype
from .conformance import (
    Candidate,
    Tolerance,
    check,
    compare,
    same_bits,
)
from .ops_bench import HEADS, INDEX, PAGE_SIZE, PAGES, POSITIONS, OpsBench, looser
from .oracles import paged


class OpsCacheTests(OpsBench, standard=True):
    """Tests of `rope_write`, `copy_pages` and `move_entries`."""

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
        q, k, v = ops.rope_write(qkv, (*HEADS, size), self.index(POSITIONS), None, cache, self.index(INDEX))
        source = qkv.view(len(INDEX), -1, size)
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
        made = self.make_layout(layout, HEADS[1], head_size, dtype)
        if not ops.writes(made):
            pytest.skip(f"does not write layout {layout}")
        cache, index = self.cache_of(made), self.index(INDEX)
        self.poison_cache(cache, index)
        before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
        qkv, rope = self.qkv(dtype, head_size), self.tables(head_size)
        ops.rope_write(qkv, (*HEADS, head_size), self.index(POSITIONS), rope, cache, index)
        _, k, v = self.turned(qkv, head_size, rope)
        for name, right, found in zip("kv", (k, v), self.read_cache(cache, index), strict=True):
            tolerance, right = looser(dtype), right.cpu()
            error = self.write_error(cache, index, right, name)
            if error is None:
                compare(found, right, tolerance, f"the {name} written")
            else:
                room = error + tolerance.absolute + tolerance.relative * right.abs()
                compare((found - right) / room, torch.zeros_like(right), Tolerance(1.0, 0.0), f"the {name} quantized")
        written = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
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
        order = list(range(PAGES * PAGE_SIZE))
        for one, other in zip(source, target, strict=True):
            order[other] = one
        expected = self.read_cache(cache, torch.tensor(order))
        ops.move_entries(cache, self.index(source), self.index(target))
        found = self.read_cache(cache, torch.arange(len(order)))
        for name, new, right in zip("kv", found, expected, strict=True):
            check(same_bits(new, right), f"{name}: entries {source} were not moved to {target} as they were before")

    def filled(self, ops: Ops, layout: str, dtype: str) -> LayerCache:
        made = self.make_layout(layout, HEADS[1], self.head_sizes[0], dtype)
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
        page = PAGE_SIZE * heads[1] * size
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
        cache = LayerCache(layout=layout, group=0, page_size=PAGE_SIZE, tensors=tensors)
        index = self.index(((pages - 2) * PAGE_SIZE + 3, pages * PAGE_SIZE - 1))
        qkv = self.random(2, (heads[0] + 2 * heads[1]) * size, dtype=dtype)
        ops.rope_write(qkv, (*heads, size), self.index((0, 1)), None, cache, index)
        expected = qkv.view(2, -1, size).cpu().double()
        for name, found, first in zip("kv", self.read_cache(cache, index), (1, 9), strict=True):
            compare(found, expected[:, first : first + 8], looser(dtype), f"{name} past 2^31 elements")
            check(not tensors[name][:2].any(), f"{name}: entries at the start of the cache were written")


def _pages(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    return tensor.view(torch.uint8)[list(order)].view(tensor.dtype)
