"""Steps for attention backends to be tried on: needs, layers, caches, rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

import msgspec
import torch
from torch import Tensor

from ..contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, KVLayout, LayerCache
from ..dtypes import torch_dtype
from .conformance import TOLERANCES, Candidate, Suite, Tolerance, check, compare, normal
from .oracles import paged
from .oracles.attention import Built, Step, make_rows, page_tables

Phase = Literal["prefill", "decode"]

#: Rows of (queries, entries): whole prompts, chunks that continue one, single tokens; first and last entries of pages.
_PREFILL: Final = ((9, 9), (1, 1), (4, 33), (17, 20), (1, 17), (2, 2), (33, 70), (16, 16))
_DECODE: Final = ((1, 5), (1, 33), (1, 1), (1, 16), (1, 17), (1, 100), (1, 64))


class AttentionBench(Suite, standard=True):
    """What the tests of `AttentionSuite` work with."""

    role = "attention"
    features = ("window", "softcap", "sinks", "verify", "ancestors", "batch_invariant", "int8", "float8_e4m3fn")
    axes: ClassVar[Mapping[str, str]] = {
        "dtype": "dtypes",
        "phase": "phases",
        "page_size": "page_sizes",
        "head_size": "head_sizes",
        "ratio": "ratios",
        "kv_dtype": "kv_dtypes",
        "window": "windows",
    }
    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    page_sizes: ClassVar[tuple[int, ...]] = (16, 64)
    head_sizes: ClassVar[tuple[int, ...]] = (64, 72, 80, 96, 128, 256)
    #: Query heads a KV head.
    ratios: ClassVar[tuple[int, ...]] = (1, 3, 5, 7, 16, 20)
    #: dtypes of quantized caches.
    kv_dtypes: ClassVar[tuple[str, ...]] = ("int8", "float8_e4m3fn")
    windows: ClassVar[tuple[int, ...]] = (1, 5, 16, 40, 4096)

    # -- what a step is made of

    @classmethod
    def need(cls, dtype: str, phase: Phase, *layers: AttentionLayer, **changes: Any) -> AttentionNeed:
        """What the backend is asked to serve; `changes` are fields of the need."""
        fields: dict[str, Any] = {
            "device": cls.facts(),
            "dtype": dtype,
            "kv_dtype": dtype,
            "page_size": cls.page_sizes[0],
            "layers": layers or (cls.layer(),),
            "phase": phase,
            "max_query": 512 if phase == "prefill" else 1,
            "max_rows": 16,
            "max_length": 4096,
        }
        return AttentionNeed(**(fields | changes))

    @classmethod
    def layer(cls, ratio: int = 3, kv_heads: int = 2, head_size: int | None = None, **facts: Any) -> AttentionLayer:
        size = head_size or cls.head_sizes[0]
        return AttentionLayer(
            query_heads=ratio * kv_heads, kv_heads=kv_heads, head_size=size, scale=1 / math.sqrt(size), **facts
        )

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, AttentionNeed]]:
        dtype, phase = cls.dtypes[0], cls.phases[0]
        for one in cls.dtypes:
            yield f"dtype {one}", cls.need(one, phase)
        for declared in cls.phases if cls.is_declared("phases") else ():
            yield f"phase {declared}", cls.need(dtype, declared)
        for size in cls.page_sizes if cls.is_declared("page_sizes") else ():
            yield f"page size {size}", cls.need(dtype, phase, page_size=size)
        for size in cls.head_sizes if cls.is_declared("head_sizes") else ():
            yield f"head size {size}", cls.need(dtype, phase, cls.layer(head_size=size))
        for ratio in cls.ratios if cls.is_declared("ratios") else ():
            yield f"{ratio} query heads a KV head", cls.need(dtype, phase, cls.layer(ratio))
        for name in cls.kv_dtypes if cls.is_declared("kv_dtypes") else ():
            yield f"K/V of {name}", cls.need(dtype, phase, kv_dtype=name)
        for claim in cls.claims:
            yield f"claim {claim}", cls._claimed(claim, dtype, phase)

    @classmethod
    def _claimed(cls, claim: str, dtype: str, phase: Phase) -> AttentionNeed:
        facts: dict[str, dict[str, Any]] = {
            "window": {"window": 16},
            "softcap": {"softcap": 2.0},
            "sinks": {"sinks": True},
        }
        changes: dict[str, dict[str, Any]] = {
            "verify": {"phase": "decode", "max_query": 4},
            "ancestors": {"phase": "decode", "max_query": 5, "ancestors": True},
            "batch_invariant": {"batch_invariant": True},
            **{name: {"kv_dtype": name} for name in ("int8", "float8_e4m3fn")},
        }
        need = cls.need(dtype, phase, cls.layer(**facts.get(claim, {})))
        return msgspec.structs.replace(need, **changes.get(claim, {}))

    def fill_cache(self, cache: LayerCache, seed: int) -> None:
        """Put random values of unit size into every entry."""
        paged.fill_entries(cache, seed)

    def read_cache(self, cache: LayerCache, entries: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of flat entries [N]: float64 [N, K, D] on the CPU, as the cache means them."""
        return paged.read_entries(cache, entries)

    def poison_cache(self, cache: LayerCache, keep: Tensor) -> None:
        """Make every entry NaN but the flat entries `keep` [N]."""
        paged.poison_entries(cache, keep)

    def build(self, candidate: Candidate, need: AttentionNeed, step: Step) -> Built:
        """The step on the device, for the first layer of the need and the backend's first layout."""
        candidate.require(need)
        layer, device, dtype = need.layers[0], self.device, torch_dtype(need.dtype)
        table, pages = page_tables(step, need.page_size, layer.window, device)
        slots = torch.randperm(len(step.rows), generator=torch.Generator().manual_seed(step.seed))
        rows = make_rows(step, table, slots.to(device))
        cache = paged.allocate(self.layout(candidate, need), pages, need.page_size, device)
        self.fill_cache(cache, step.seed)
        q = normal(rows.bounds.tokens, layer.query_heads, layer.head_size, seed=step.seed + 2) * step.spread
        sinks = normal(layer.query_heads, seed=step.seed + 3).float().to(device) if layer.sinks else None
        built = Built(step, layer, q.to(device, dtype), None, None, cache, rows, sinks)
        if need.kv_dtype != need.dtype:
            return built
        k, v = self._own(built)
        return replace(built, k=k, v=v)

    def _own(self, built: Built) -> tuple[Tensor, Tensor]:
        """The step's own K and V, as the cache has them; anything where a row is idle."""
        shape = (built.q.shape[0], built.layer.kv_heads, built.layer.head_size)
        own = (normal(*shape, seed=5), normal(*shape, seed=6))
        for row, (queries, kv_len) in enumerate(built.step.rows):
            if kv_len:
                for mine, read in zip(own, self.read_cache(built.cache, built.entries(row)[-queries:]), strict=True):
                    mine[built.tokens(row)] = read
        k, v = (x.to(built.q.device, built.q.dtype) for x in own)
        return k, v

    def layout(self, candidate: Candidate, need: AttentionNeed) -> KVLayout:
        layouts = candidate.factory.layouts(need, need.layers[0], candidate.options)
        check(bool(layouts), "layouts() offers none, and refusals() does not say why")
        layout: KVLayout = layouts[0]
        return layout

    def make(self, candidate: Candidate, need: AttentionNeed) -> tuple[AttentionBackend[Any], dict[str, Tensor]]:
        """A backend and its workspace, zeros as the runner makes it."""
        backend = candidate.create(need)
        return backend, {
            spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device)
            for spec in backend.workspace()
        }

    def run(self, candidate: Candidate, need: AttentionNeed, built: Built) -> Tensor:
        """One plan and one layer of a new backend."""
        backend, workspace = self.make(candidate, need)
        return forward(backend, built, backend.plan(built.rows, built.layer, workspace))

    def hold(self, candidate: Candidate, need: AttentionNeed, built: Built, what: str) -> None:
        """The step must give what the definition gives, of the cache's entries as they are or, if they are quantized,
        as the compute dtype has them."""
        base = TOLERANCES[need.dtype]
        # A score that is rounded shifts its weight by as much: they reach four times the spread
        rounding = torch.finfo(torch.float64 if need.dtype == "float64" else torch.float32).eps
        shift = 4 * built.step.spread * rounding
        tolerance = Tolerance(base.absolute + shift, base.relative + shift)
        expected = built.expected(self.read_cache)
        rounded = None if need.kv_dtype == need.dtype else built.expected(self._read_rounded(need))
        found = self.run(candidate, need, built)
        if rounded is not None:
            with contextlib.suppress(AssertionError):
                compare(found, rounded, tolerance, what)
                return
        compare(found, expected, tolerance, what)

    def _read_rounded(self, need: AttentionNeed) -> Callable[[LayerCache, Tensor], tuple[Tensor, Tensor]]:
        dtype = torch_dtype(need.dtype)

        def read(cache: LayerCache, entries: Tensor) -> tuple[Tensor, Tensor]:
            k, v = self.read_cache(cache, entries)
            return k.to(dtype).double(), v.to(dtype).double()

        return read

    def hold_steps(self, candidate: Candidate, need: AttentionNeed, *steps: Step) -> None:
        for step in steps:
            self.hold(candidate, need, self.build(candidate, need, step), f"rows {step.rows}")

    def rows(self, phase: Phase) -> tuple[tuple[int, int], ...]:
        rows = _PREFILL if phase == "prefill" else _DECODE
        return rows[:4] if self.grid == "small" else rows


def forward(backend: AttentionBackend[Any], built: Built, plan: Any) -> Tensor:
    with torch.inference_mode():
        return backend.forward(built.q, built.k, built.v, built.cache, plan, built.sinks)
