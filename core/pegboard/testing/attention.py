"""The suite for attention backends: against float64 over dense rows, whatever the layout, page table and phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec
import pytest
import torch
from torch import Tensor

from ..dtypes import torch_dtype
from .attention_bench import AttentionBench, Phase, forward
from .conformance import TOLERANCES, Candidate, check, compare, no_synchronisation, same_bits, unchanged
from .oracles.attention import Step, visible, with_bounds
from .oracles.attention import attend as dense

_VERIFY: Final = ((4, 4), (4, 30), (4, 17), (4, 64))
#: A token that branches twice, as bit masks over the row's queries: 0 -> 1, 2; 1 -> 3; 2 -> 4.
_TREE: Final = (0b1, 0b11, 0b101, 0b1011, 0b10101)
_CHAIN: Final = (0b1, 0b11, 0b111)
_LIMIT: Final = 1 << 31


class AttentionSuite(AttentionBench, standard=True):
    """Subclass it, set `part`, `device` and `dtypes`. A backend of a layout that `oracles.paged` does not know also
    overrides `fill_cache`, `read_cache` and `poison_cache`."""

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

    def test_texts_with_gradients(self, candidate: Candidate) -> None:
        """What `differentiable` gives, where it gives something: each text alone, causal, and its gradients."""
        lengths, device = (9, 1, 20), self.device
        starts = torch.tensor([0, 9, 10, 30], dtype=torch.int32, device=device)
        given = 0
        for layer in (self.layer(), self.layer(window=5), self.layer(softcap=1.5)):
            attend = candidate.factory.differentiable(self.facts(), layer)
            if attend is None:
                continue
            given += 1
            generator = torch.Generator().manual_seed(given)
            heads = (layer.query_heads, layer.kv_heads, layer.kv_heads, layer.query_heads)
            *exact, dout = (
                torch.randn(30, count, layer.head_size, generator=generator, dtype=torch.float64) for count in heads
            )
            inputs = [x.to(device, torch.float32).requires_grad_() for x in exact]
            found = attend(*inputs, starts, max(lengths))
            check(found.dtype == torch.float32, f"attention of float32 is {found.dtype}")
            leaves = [x.requires_grad_() for x in exact]
            texts = zip(*(torch.split(x, list(lengths)) for x in leaves), lengths, strict=True)
            truth = torch.cat(
                [dense(q, k, v, visible(length, length, layer.window, None), layer, None) for q, k, v, length in texts]
            )
            tolerance = TOLERANCES["bfloat16"]  # as it may round
            compare(found, truth, tolerance, "attention of texts")
            wanted = torch.autograd.grad(truth, leaves, dout)
            gradients = torch.autograd.grad(found, inputs, dout.to(device, torch.float32))
            for name, one, expected in zip("qkv", gradients, wanted, strict=True):
                # Sums of rounded numbers: an element may be off by a share of the largest
                compare(one / expected.abs().max(), expected / expected.abs().max(), tolerance, f"gradient of {name}")
        if not given:
            pytest.skip("has no gradients")

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
                forward(backend, built, backend.plan(built.rows, built.layer, workspace))

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
            found = forward(backend, built, plan)
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
            compare(forward(backend, built, plan), right, TOLERANCES[dtype], what)

    def test_repeats_itself(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """The same step gives the same bits, with another step of the same backend in between."""
        need = self.need(dtype, phase)
        built = self.build(candidate, need, Step(self.rows(phase)))
        other = self.build(candidate, need, Step(((1, 90), (1, 70)), seed=7))
        backend, workspace = self.make(candidate, need)
        first, _, again = (forward(backend, b, backend.plan(b.rows, b.layer, workspace)) for b in (built, other, built))
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
        forward(backend, built, backend.plan(built.rows, built.layer, workspace))  # kernels are compiled
        with no_synchronisation(self.device):
            forward(backend, built, backend.plan(built.rows, built.layer, workspace))

    def test_capturable(self, candidate: Candidate, dtype: str, phase: Phase) -> None:
        """A recorded graph must follow new lengths, pages and queries, idle rows included."""
        if not self.device.startswith("cuda") or not candidate.factory.capturable:
            pytest.skip("recorded on CUDA only, when the backend says that it is capturable")
        need = self.need(dtype, phase)
        rows = self.rows(phase)
        built = self.build(candidate, need, Step(rows, slack=200))
        backend, workspace = self.make(candidate, need)
        graph, out = _capture(lambda: forward(backend, built, backend.plan(built.rows, built.layer, workspace)))
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
