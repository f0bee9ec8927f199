"""The suite for attention backends: against float64 over dense rows, whatever the layout, page table and phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

import msgspec
import pytest
import torch
from torch import Tensor

from ..contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, KVLayout, LayerCache
from ..dtypes import torch_dtype
from .conformance import TOLERANCES, Candidate, Suite, check, compare, no_synchronisation, normal, same_bits, unchanged
from .oracles import paged
from .oracles.attention import Built, Step, make_rows, page_tables, with_bounds

Phase = Literal["prefill", "decode"]

#: Rows of (queries, entries): whole prompts, chunks that continue one, single tokens; first and last entries of pages.
_PREFILL: Final = ((9, 9), (1, 1), (4, 33), (17, 20), (1, 17), (2, 2), (33, 70), (16, 16))
_DECODE: Final = ((1, 5), (1, 33), (1, 1), (1, 16), (1, 17), (1, 100), (1, 64))
_VERIFY: Final = ((4, 4), (4, 30), (4, 17), (4, 64))
#: A token that branches twice, as bit masks over the row's queries: 0 -> 1, 2; 1 -> 3; 2 -> 4.
_TREE: Final = (0b1, 0b11, 0b101, 0b1011, 0b10101)
_CHAIN: Final = (0b1, 0b11, 0b111)
_LIMIT: Final = 1 << 31


class AttentionSuite(Suite, standard=True):
    """Subclass it, set `part`, `device` and `dtypes`. A backend of a layout that `oracles.paged` does not know also
    overrides `fill_cache`, `read_cache` and `poison_cache`."""

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
        return _forward(backend, built, backend.plan(built.rows, built.layer, workspace))

    def hold(self, candidate: Candidate, need: AttentionNeed, built: Built, what: str) -> None:
        """The step must give what the definition gives."""
        expected = built.expected(self.read_cache)
        compare(self.run(candidate, need, built), expected, TOLERANCES[need.dtype], what)

    def hold_steps(self, candidate: Candidate, need: AttentionNeed, *steps: Step) -> None:
        for step in steps:
            self.hold(candidate, need, self.build(candidate, need, step), f"rows {step.rows}")

    def rows(self, phase: Phase) -> tuple[tuple[int, int], ...]:
        rows = _PREFILL if phase == "prefill" else _DECODE
        return rows[:4] if self.grid == "small" else rows

    # -- the result

    def test_matches_reference(self, candidate: Candidate, dtype: str, phase: Phase, page_size: int) -> None:
        """Ragged rows over shuffled page tables; one row alone; prompts of equal length."""
        need = self.need(dtype, phase, page_size=page_size)
        steps = [Step(self.rows(phase)), Step(((1, 3 * page_size + 1),), seed=9)]
        if phase == "prefill":
            steps.append(Step(((24, 24), (24, 24)), seed=10))
        self.hold_steps(candidate, need, *steps)

    def test_result_is_contiguous_and_in_the_dtype_of_q(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        need = self.need(dtype, phase)
        built = self.build(candidate, need, Step(self.rows(phase)))
        found = self.run(candidate, need, built)
        check(found.dtype == built.q.dtype, f"the result is {found.dtype}, q is {built.q.dtype}")
        check(found.shape == built.q.shape, f"the result is {tuple(found.shape)}, q is {tuple(built.q.shape)}")
        check(found.is_contiguous(), f"the result has strides {found.stride()}")

    def test_head_sizes(self, candidate: Candidate, dtype: str, phase: Phase, head_size: int) -> None:
        rows = self.rows(phase)[2:4]
        for ratio in (1, 3, 7) if self.grid == "full" else (3,):
            self.hold_steps(candidate, self.need(dtype, phase, self.layer(ratio, head_size=head_size)), Step(rows))

    def test_group_ratios(self, candidate: Candidate, dtype: str, phase: Phase, ratio: int) -> None:
        rows = self.rows(phase)[2:4]
        for kv_heads in (1, 2) if self.grid != "small" else (1,):
            self.hold_steps(candidate, self.need(dtype, phase, self.layer(ratio, kv_heads)), Step(rows))

    def test_long_rows(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """Rows of very different length: whatever splits them must merge them again."""
        reach = {"small": 250, "normal": 1500, "full": 4095}[self.grid]
        queries = 1 if phase == "decode" else 40
        self.hold_steps(candidate, self.need(dtype, phase), Step(((queries, reach), (1, 2), (queries, reach // 3))))

    def test_large_scores(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """Scores whose exponentials overflow: the greatest must be subtracted first."""
        self.hold_steps(candidate, self.need(dtype, phase), Step(self.rows(phase)[2:4], spread=60.0))

    def test_window(self, candidate: Candidate, dtype: str, phase: Phase, window: int) -> None:
        self.hold_steps(candidate, self.need(dtype, phase, self.layer(window=window)), Step(self.rows(phase)))

    def test_soft_cap(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        self.hold_steps(candidate, self.need(dtype, phase, self.layer(softcap=1.5)), Step(self.rows(phase), spread=3.0))

    def test_sinks(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        self.hold_steps(candidate, self.need(dtype, phase, self.layer(sinks=True)), Step(self.rows(phase)))

    def test_window_soft_cap_and_sinks_together(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        layer = self.layer(window=5, softcap=1.5, sinks=True)
        self.hold_steps(candidate, self.need(dtype, phase, layer), Step(self.rows(phase)))

    def test_verify_rows(self, candidate: Candidate, dtype: str) -> None:
        """Decode rows of 1 + k queries, all equal and ragged."""
        need = self.need(dtype, "decode", max_query=4)
        self.hold_steps(candidate, need, Step(_VERIFY), Step(((4, 40), (1, 7), (3, 3))))

    def test_ancestors(self, candidate: Candidate, dtype: str) -> None:
        """Trees, and chains written as trees; windows count along a query's own path."""
        step = Step(((5, 5), (5, 40), (3, 18), (1, 9)), ancestors=(_TREE, _TREE, _CHAIN, (1,)))
        self.hold_steps(candidate, self.need(dtype, "decode", max_query=5, ancestors=True), step)
        window = self.need(dtype, "decode", self.layer(window=3), max_query=5, ancestors=True)
        if not candidate.refusals(window):
            self.hold_steps(candidate, window, step)

    def test_quantized_cache(self, candidate: Candidate, dtype: str, phase: Phase, kv_dtype: str) -> None:
        """The numbers that payload and scale stand for, exactly: quantizing is the write op's matter."""
        self.hold_steps(candidate, self.need(dtype, phase, kv_dtype=kv_dtype), Step(self.rows(phase)))

    # -- what rows look like

    def test_shared_pages(self, candidate: Candidate, dtype: str, phase: Phase, page_size: int) -> None:
        """A common prefix, and rows that name the very same pages."""
        reach = 2 * page_size + 5
        n = 1 if phase == "decode" else 3
        prefix = Step(((n, reach), (n, 2 * page_size + 1), (1, page_size + 1)), shared_pages=1)
        self.hold_steps(candidate, self.need(dtype, phase, page_size=page_size), prefix)
        same = Step(((n, reach), (n, reach)), shared_pages=3)
        self.hold_steps(candidate, self.need(dtype, phase, page_size=page_size), same)

    def test_idle_rows_give_zeros(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """Rows without entries, among others and alone, whatever their queries and pages hold."""
        n = 1 if phase == "decode" else 7
        for rows in (((1, 5), (n, 0), (1, 33), (n, 0)), ((n, 0),), ((n, 0), (n, 0))):
            need = self.need(dtype, phase)
            built = self.build(candidate, need, Step(rows))
            for row, (_, kv_len) in enumerate(rows):
                if not kv_len:
                    for tensor in (built.q, built.k, built.v):
                        if tensor is not None:
                            tensor[built.tokens(row)] = torch.nan
            self.hold(candidate, need, built, f"rows {rows}")

    def test_bounds_may_be_loose(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """`max_kv` is an upper bound: the true lengths are on the device."""
        self.hold_steps(
            candidate, self.need(dtype, phase), Step(self.rows(phase), slack=37), Step(((1, 3),), slack=1000)
        )

    def test_strided_inputs(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """q, k and v as slices of one fused projection."""
        need = self.need(dtype, phase)
        built = self.build(candidate, need, Step(self.rows(phase)))
        parts = [x for x in (built.q, built.k, built.v) if x is not None]
        fused = torch.cat([torch.full_like(parts[0][:, :1], torch.nan), *parts], dim=1)
        views = list(fused[:, 1:].split_with_sizes([x.shape[1] for x in parts], dim=1))
        k, v = views[1:] if built.k is not None else (None, None)
        strided = replace(built, q=views[0], k=k, v=v)
        self.hold(candidate, need, strided, "strided q, k and v")

    def test_own_k_and_v_may_be_absent(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """The cache holds this step's entries; write ops that keep no copy pass None."""
        need = self.need(dtype, phase)
        for step in (Step(self.rows(phase)), Step(((9, 9), (9, 9)) if phase == "prefill" else ((1, 1),))):
            built = self.build(candidate, need, step)
            self.hold(candidate, need, replace(built, k=None, v=None), "without k and v")

    def test_entries_past_two_to_the_31(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """The offset of an element in a large cache does not fit 32 bits. Skipped where memory is short."""
        if self.grid == "small":
            pytest.skip("an interpreter would copy the whole cache")
        layer = self.layer(1, kv_heads=8, head_size=self.head_sizes[-1])
        need = self.need(dtype, phase, layer)
        page = need.page_size * layer.kv_heads * layer.head_size
        pages = _LIMIT // page + 64
        size = pages * page * torch_dtype(dtype).itemsize
        if need.device.free_bytes < size * 9 // 8:
            pytest.skip(f"needs {size} bytes, {need.device.free_bytes} are free")
        small = self.build(candidate, need, Step(((1, 20), (1, 45))))
        if set(small.cache.tensors) != {"k", "v"}:
            pytest.skip(f"layout {small.cache.layout.name!r} has tensors that would have to grow, too")
        # K and V may be one tensor: nobody writes. Pages that are not touched cost nothing on a CPU.
        first = small.cache.tensors["k"]
        try:
            huge = torch.empty((pages, *first.shape[1:]), dtype=first.dtype, device=first.device)
        except RuntimeError as error:
            pytest.skip(f"{size} bytes could not be had: {error}")
        low = first.shape[0]
        huge[:low] = small.cache.tensors["v"]  # what a 32-bit offset would find
        huge[-low:] = first
        cache = msgspec.structs.replace(small.cache, tensors={"k": huge, "v": huge})
        rows = msgspec.structs.replace(small.rows, page_table=small.rows.page_table + (pages - low))
        built = replace(small, cache=cache, rows=rows, v=small.k)
        self.hold(candidate, need, built, f"pages from {pages - low}")

    # -- what may be read and written

    @pytest.mark.parametrize("kind", ["plain", "window", "verify", "ancestors"])
    def test_reads_only_what_is_visible(self, candidate: Candidate, dtype: str, phase: Phase, kind: str) -> None:
        """NaN in every entry that no query may see: past the end, before the window, in other pages."""
        step, changes, layer = Step(self.rows(phase)), {}, self.layer(window=5 if kind == "window" else None)
        if kind in ("verify", "ancestors"):
            if phase != "decode":
                pytest.skip("verification is decode")
            step = Step(_VERIFY) if kind == "verify" else Step(((5, 5), (5, 40)), ancestors=(_TREE, _TREE))
            changes = {"max_query": 5, "ancestors": kind == "ancestors"}
        need = self.need(dtype, phase, layer, **changes)
        built = self.build(candidate, need, step)
        self.poison_cache(built.cache, built.seen_entries())
        self.hold(candidate, need, built, f"NaN in what is not visible ({kind})")

    def test_a_broken_row_stays_alone(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """NaN in one row's queries and entries must not reach the others."""
        need, rows = self.need(dtype, phase), self.rows(phase)
        built = self.build(candidate, need, Step(rows))
        entries = torch.ones(built.cache.tensors["k"].shape[0] * need.page_size, dtype=torch.bool)
        entries[built.entries(1)] = False
        self.poison_cache(built.cache, entries.nonzero()[:, 0])
        for tensor in (built.q, built.k, built.v):
            if tensor is not None:
                tensor[built.tokens(1)] = torch.nan
        expected = built.expected(self.read_cache)
        found = self.run(candidate, need, built)
        for row in range(len(rows)):
            if row != 1:
                at = built.tokens(row)
                compare(found[at], expected[at], TOLERANCES[dtype], f"row {row} beside a broken one")

    def test_inputs_are_not_changed(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        need = self.need(dtype, phase)
        for built in (
            self.build(candidate, need, Step(self.rows(phase))),
            self.build(candidate, need, Step(((1, 5), (1, 0), (1, 40)))),
        ):
            backend, workspace = self.make(candidate, need)
            with unchanged(**built.inputs):
                _forward(backend, built, backend.plan(built.rows, built.layer, workspace))

    # -- plans and repetition

    def test_a_plan_serves_every_layer(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """Equal layers share a plan: nothing of one layer's tensors may stay in it."""
        need = self.need(dtype, phase)
        one = self.build(candidate, need, Step(self.rows(phase)))
        other = replace(self.build(candidate, need, Step(self.rows(phase), seed=50)), rows=one.rows)
        k, v = self._own(other) if one.k is not None else (None, None)
        other = replace(other, k=k, v=v)
        backend, workspace = self.make(candidate, need)
        plan = backend.plan(one.rows, one.layer, workspace)
        expected = [built.expected(self.read_cache) for built in (one, other, one)]
        for number, built in enumerate((one, other, one)):
            found = _forward(backend, built, plan)
            compare(found, expected[number], TOLERANCES[dtype], f"layer {number} of one plan")

    def test_layers_of_a_step_have_plans_of_their_own(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """Window and full layers beside each other: all plans are made first, then used in turn."""
        layers = (self.layer(), self.layer(window=5))
        both = self.need(dtype, phase, *layers)
        backend, workspace = self.make(candidate, both)
        needs = [msgspec.structs.replace(both, layers=(layer,)) for layer in layers]
        steps = [self.build(candidate, need, Step(self.rows(phase))) for need in needs]
        plans = [backend.plan(built.rows, built.layer, workspace) for built in steps]
        expected = [built.expected(self.read_cache) for built in steps]
        for built, plan, right in zip(steps, plans, expected, strict=True):
            what = f"a layer of window {built.layer.window} beside another"
            compare(_forward(backend, built, plan), right, TOLERANCES[dtype], what)

    def test_repeats_itself(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """The same step gives the same bits, with another step of the same backend in between."""
        need = self.need(dtype, phase)
        built = self.build(candidate, need, Step(self.rows(phase)))
        other = self.build(candidate, need, Step(((1, 90), (1, 70)), seed=7))
        backend, workspace = self.make(candidate, need)
        first, _, again = (
            _forward(backend, b, backend.plan(b.rows, b.layer, workspace)) for b in (built, other, built)
        )
        check(same_bits(first, again), "the same step gave other bits the second time")

    def test_batch_invariant(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """When the need asks for it: a row's bits do not depend on its neighbours, its place or the bounds."""
        need = self.need(dtype, phase, batch_invariant=True)
        rows = (*self.rows(phase), (1, 300))
        built = self.build(candidate, need, Step(rows))
        together = self.run(candidate, need, built)
        loose = replace(built, rows=with_bounds(built.rows, max_kv=2 * built.rows.bounds.max_kv))
        check(same_bits(self.run(candidate, need, loose), together), "another `max_kv` gave other bits")
        backwards = built.select(range(len(rows) - 1, -1, -1))
        turned = self.run(candidate, need, backwards)
        for row in range(len(rows)):
            alone = self.run(candidate, need, built.select([row]))
            there = together[built.tokens(row)]
            check(same_bits(alone, there), f"row {rows[row]} gave other bits alone")
            place = backwards.tokens(len(rows) - 1 - row)
            check(same_bits(turned[place], there), f"row {rows[row]} gave other bits at another place")

    # -- the device

    def test_does_not_synchronise(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        if not self.device.startswith("cuda"):
            pytest.skip("a CPU has nothing to wait for")
        need = self.need(dtype, phase)
        built = self.build(candidate, need, Step(self.rows(phase)))
        backend, workspace = self.make(candidate, need)
        _forward(backend, built, backend.plan(built.rows, built.layer, workspace))  # kernels are compiled
        with no_synchronisation(self.device):
            _forward(backend, built, backend.plan(built.rows, built.layer, workspace))

    def test_capturable(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """A recorded graph must follow new lengths, pages and queries, idle rows included."""
        if not self.device.startswith("cuda") or not candidate.factory.capturable:
            pytest.skip("recorded on CUDA only, when the backend says that it is capturable")
        need = self.need(dtype, phase)
        rows = self.rows(phase)
        built = self.build(candidate, need, Step(rows, slack=200))
        backend, workspace = self.make(candidate, need)
        graph, out = _capture(lambda: _forward(backend, built, backend.plan(built.rows, built.layer, workspace)))
        shorter = tuple((n, 0 if row == 1 else max(n, kv_len - 1)) for row, (n, kv_len) in enumerate(rows))
        for step in (Step(shorter, seed=30), Step(rows, seed=31)):
            new = self.build(
                candidate, need, replace(step, slack=built.rows.bounds.max_kv - max(kv for _, kv in step.rows))
            )
            for name, tensor in built.inputs.items():
                source = new.inputs[name]
                if tensor is not None and source is not None:
                    tensor.copy_(source)
            graph.replay()
            torch.cuda.synchronize()
            expected = new.expected(self.read_cache)
            compare(out, expected, TOLERANCES[dtype], f"a replayed graph, rows {step.rows}")


def _forward(backend: AttentionBackend[Any], built: Built, plan: Any) -> Tensor:
    with torch.inference_mode():
        return backend.forward(built.q, built.k, built.v, built.cache, plan, built.sinks)


def _capture(call: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out: Tensor = call()
    return graph, out


__all__: Sequence[str] = ["AttentionSuite", "Phase"]
