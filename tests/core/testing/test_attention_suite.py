"""The attention suite catches what it is for: a deliberately broken backend an invariant, and the tests that see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionLayer, AttentionNeed, KVLayout, LayerCache, TextAttention
from pegboard.contracts.batch import Rows
from pegboard.contracts.device import DeviceFacts, TensorSpec
from pegboard.heads.attention import attend_in_torch
from pegboard.testing import AttentionSuite, run_suite
from pegboard.testing.oracles.attention import visible
from pegboard_attention.torch_backend import TorchAttention, TorchPlan

replace = msgspec.structs.replace


class Reference(TorchAttention):
    """What the broken ones below change one thing of."""

    def __init__(self, need: AttentionNeed) -> None:
        super().__init__(need)
        self.need = need


# -- results


class TextsMeet(Reference):
    @classmethod
    def differentiable(cls, device: DeviceFacts, layer: AttentionLayer) -> TextAttention | None:
        if layer.window is not None or layer.softcap is not None:
            return None
        attend = attend_in_torch(layer)

        def of_all(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
            return attend(q, k, v, starts[[0, -1]], longest)

        return of_all


class Wrong(Reference):
    def forward(self, *inputs: Any) -> Tensor:
        return super().forward(*inputs) * 1.001


class SmallPagesOnly(Reference):
    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        plan = super().plan(rows, layer, workspace)
        plan._page_size = 16
        return plan


class PowersOfTwoOnly(Reference):
    """Leaves the head's last dimensions out."""

    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        q = q.clone()
        q[..., 1 << (q.shape[-1].bit_length() - 1) :] = 0
        return super().forward(q, k, v, cache, plan, sinks)


class SixteenHeadsAGroup(Reference):
    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        out = super().forward(q, k, v, cache, plan, sinks)
        out.unflatten(1, (plan.layer.kv_heads, -1))[:, :, 16:] = 0
        return out


class ShortSplits(Reference):
    """Forgets all but the last entries."""

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        return super().plan(rows, replace(layer, window=layer.window or 200), workspace)


class Overflows(Reference):
    """Exponentials of scores as they are."""

    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        out = torch.zeros_like(q)
        start = plan.rows.query_start.tolist()
        for row, kv_len in enumerate(plan.rows.kv_len.tolist()):
            entry = torch.arange(kv_len)
            flat = plan.rows.page_table[row, entry // plan._page_size].long() * plan._page_size
            keys, values = (cache.tensors[n].flatten(0, 1)[flat + entry % plan._page_size] for n in ("k", "v"))
            group = q.shape[1] // keys.shape[1]
            own = slice(start[row], start[row + 1])
            scores = torch.einsum("nhd,lhd->hnl", q[own], keys.repeat_interleave(group, 1)) * plan.layer.scale
            seen = visible(own.stop - own.start, kv_len, None, None)
            weights = scores.exp() * seen
            mixed = torch.einsum("hnl,lhd->nhd", weights, values.repeat_interleave(group, 1))
            out[own] = mixed / weights.sum(-1).T[..., None]
        return out


class IgnoresWindow(Reference):
    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        return super().plan(rows, replace(layer, window=None), workspace)


class WindowOffByOne(Reference):
    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        return super().plan(rows, replace(layer, window=layer.window and layer.window + 1), workspace)


class IgnoresSoftCap(Reference):
    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        return super().plan(rows, replace(layer, softcap=None), workspace)


class IgnoresSinks(Reference):
    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        return super().forward(q, k, v, cache, plan, sinks if sinks is None else sinks - 100)


class EveryQueryIsTheLast(Reference):
    """A decode kernel that was given verify rows."""

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        if self.need.phase == "decode" and rows.ancestors is None:
            lengths = rows.query_start.diff()
            masks = ((1 << lengths.long()) - 1).repeat_interleave(lengths)
            rows = replace(rows, ancestors=masks)
        return super().plan(rows, layer, workspace)


class IgnoresAncestors(Reference):
    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        return super().plan(replace(rows, ancestors=None), layer, workspace)


class Int8(Reference):
    """A right one: K and V of a byte, with a scale an entry and head."""

    uses_scales = True

    @classmethod
    def refusals(cls, need: AttentionNeed, options: Any) -> Sequence[str]:
        return super().refusals(replace(need, kv_dtype=need.dtype) if need.kv_dtype == "int8" else need, options)

    @classmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Any) -> Sequence[KVLayout]:
        [plain] = super().layouts(need, layer, options)
        if need.kv_dtype != "int8":
            return [plain]
        scales = [
            TensorSpec(name=f"{x}_scale", shape=(need.page_size, layer.kv_heads), dtype="float32") for x in ("k", "v")
        ]
        return [KVLayout(name="nhd", tensors=(*plain.tensors, *scales))]

    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        if self.need.kv_dtype == "int8":
            dense = {
                name: cache.tensors[name].to(q.dtype)
                * (cache.tensors[f"{name}_scale"][..., None].to(q.dtype) if self.uses_scales else 1 / 64)
                for name in ("k", "v")
            }
            cache = replace(cache, tensors=dense)
        return super().forward(q, k, v, cache, plan, sinks)


class ForgetsScales(Int8):
    uses_scales = False


# -- rows


class OwnersOnly(Reference):
    """Takes it that a page belongs to one row."""

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        table = rows.page_table.clone()
        seen: set[int] = set()
        for row, kv_len in enumerate(rows.kv_len.tolist()):
            if kv_len and int(table[row, 0]) in seen - {0}:
                table[row, 0] = 0
            seen.add(int(table[row, 0]) if kv_len else 0)
        return super().plan(replace(rows, page_table=table), layer, workspace)


class IdleRowsAreGarbage(Reference):
    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        out = super().forward(q, k, v, cache, plan, sinks)
        idle = (plan.rows.kv_len == 0).repeat_interleave(plan.rows.query_start.diff())
        return out.masked_fill(idle[:, None, None], 1.0)


class BelievesTheBound(Reference):
    """The longest row has the length that the host gave as a bound."""

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        kv_len = torch.where(rows.kv_len == rows.kv_len.amax(), rows.bounds.max_kv, rows.kv_len).to(torch.int32)
        return super().plan(replace(rows, kv_len=kv_len), layer, workspace)


class ReadsAsIfContiguous(Reference):
    def forward(self, q: Tensor, *others: Any) -> Tensor:
        heads, size = q.shape[1:]
        return super().forward(q.as_strided(q.shape, (heads * size, size, 1)), *others)


class NeedsItsOwn(Reference):
    def forward(self, q: Tensor, k: Any, v: Any, *others: Any) -> Tensor:
        return super().forward(q, k.clone(), v.clone(), *others)


class Offsets32Bits(Reference):
    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        tensors = cache.tensors["k"]
        around = (1 << 31) // tensors[0].numel()
        rows = replace(plan.rows, page_table=plan.rows.page_table % around)
        return super().forward(q, k, v, cache, super().plan(rows, plan.layer, {}), sinks)


# -- reading and writing


class MultipliesTheMasked(Reference):
    """A weight of 0 times what is not visible."""

    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        return super().forward(q, k, v, cache, plan, sinks) + 0 * cache.tensors["v"][0, 0, 0, 0]


class MixesRows(Reference):
    def forward(self, q: Tensor, *others: Any) -> Tensor:
        return super().forward(q, *others) + 0 * q.sum()


class WritesTheCache(Reference):
    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        out = super().forward(q, k, v, cache, plan, sinks)
        cache.tensors["v"][0, 0].add_(1)
        return out


class ScalesQueriesInPlace(Reference):
    def forward(self, q: Tensor, *others: Any) -> Tensor:
        out = super().forward(q, *others)
        q.mul_(2)
        return out


class ShortensTables(Reference):
    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        plan = super().plan(replace(rows, page_table=rows.page_table.clone()), layer, workspace)
        rows.page_table[0, -1] = 0
        return plan


class Transposed(Reference):
    def forward(self, *inputs: Any) -> Tensor:
        return super().forward(*inputs).transpose(0, 1).contiguous().transpose(0, 1)


class Widens(Reference):
    def forward(self, *inputs: Any) -> Tensor:
        return super().forward(*inputs).double()


# -- plans and repetition


class KeepsTheFirstLayer(Reference):
    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: Any, sinks: Any = None) -> Tensor:
        if not hasattr(plan, "kept"):
            plan.kept = {name: tensor.clone() for name, tensor in cache.tensors.items()}
        return super().forward(q, None, None, replace(cache, tensors=plan.kept), plan, sinks)


class OnePlanAtATime(Reference):
    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        self.last = super().plan(rows, layer, workspace)
        return self.last

    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        return super().forward(q, k, v, cache, self.last, sinks)


class Drifts(Reference):
    calls = 0

    def forward(self, *inputs: Any) -> Tensor:
        self.calls += 1
        return super().forward(*inputs) * (1 + 1e-6 * self.calls)


class RowByRow(Reference):
    """A right one: a row is computed alone, from its true length."""

    noise = 0.0

    @classmethod
    def refusals(cls, need: AttentionNeed, options: Any) -> Sequence[str]:
        return super().refusals(replace(need, batch_invariant=False), options)

    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: TorchPlan, sinks: Any = None) -> Tensor:
        out, starts = torch.zeros_like(q), plan.rows.query_start.tolist()
        for row, kv_len in enumerate(plan.rows.kv_len.tolist()):
            own, n = slice(starts[row], starts[row + 1]), starts[row + 1] - starts[row]
            bounds = replace(plan.rows.bounds, rows=1, tokens=n, max_query=n, min_query=n, max_kv=max(kv_len, n))
            alone = Rows(
                query_start=torch.tensor([0, n], dtype=torch.int32),
                kv_len=plan.rows.kv_len[row : row + 1],
                page_table=plan.rows.page_table[row : row + 1],
                row_slot=plan.rows.row_slot[row : row + 1],
                ancestors=None if plan.rows.ancestors is None else plan.rows.ancestors[own],
                bounds=bounds,
            )
            part = super().plan(alone, plan.layer, {})
            out[own] = super().forward(q[own].contiguous(), None, None, cache, part, sinks)
        return out * (1 + self.noise * (plan.rows.bounds.rows - 1))


class NeighboursShow(RowByRow):
    noise = 1e-7


class Standard(AttentionSuite):
    part = Reference
    grid = "small"
    head_sizes = (64, 80)
    ratios = (3, 20)
    windows = (5, 16)


#: Tests that try windows beside other things.
WINDOWED = {
    "test_window",
    "test_window_soft_cap_and_sinks_together",
    "test_layers_of_a_step_have_plans_of_their_own",
    "test_ancestors",
}

BROKEN = [
    (SmallPagesOnly, {"test_matches_reference", "test_shared_pages"}),
    (TextsMeet, {"test_texts_with_gradients"}),
    (PowersOfTwoOnly, {"test_head_sizes"}),
    (SixteenHeadsAGroup, {"test_group_ratios"}),
    (ShortSplits, {"test_long_rows"}),
    (IgnoresWindow, WINDOWED | {"test_reads_only_what_is_visible"}),
    (WindowOffByOne, WINDOWED | {"test_reads_only_what_is_visible"}),
    (IgnoresSoftCap, {"test_soft_cap", "test_window_soft_cap_and_sinks_together"}),
    (IgnoresSinks, {"test_sinks", "test_window_soft_cap_and_sinks_together"}),
    (EveryQueryIsTheLast, {"test_verify_rows", "test_reads_only_what_is_visible"}),
    (IgnoresAncestors, {"test_ancestors", "test_reads_only_what_is_visible"}),
    (ForgetsScales, {"test_quantized_cache"}),
    (OwnersOnly, {"test_shared_pages"}),
    (IdleRowsAreGarbage, {"test_idle_rows_give_zeros"}),
    (BelievesTheBound, {"test_bounds_may_be_loose"}),
    (ReadsAsIfContiguous, {"test_strided_inputs"}),
    (NeedsItsOwn, {"test_own_k_and_v_may_be_absent"}),
    (MultipliesTheMasked, {"test_reads_only_what_is_visible"}),
    (MixesRows, {"test_a_broken_row_stays_alone", "test_idle_rows_give_zeros"}),
    (WritesTheCache, {"test_inputs_are_not_changed"}),
    (
        ScalesQueriesInPlace,
        {"test_inputs_are_not_changed", "test_a_plan_serves_every_layer", "test_repeats_itself"},
    ),
    (ShortensTables, {"test_inputs_are_not_changed"}),
    (Transposed, {"test_result_is_contiguous_and_in_the_dtype_of_q"}),
    (Widens, {"test_result_is_contiguous_and_in_the_dtype_of_q"}),
    (KeepsTheFirstLayer, {"test_a_plan_serves_every_layer"}),
    (OnePlanAtATime, {"test_layers_of_a_step_have_plans_of_their_own"}),
    (Drifts, {"test_repeats_itself"}),
    (NeighboursShow, {"test_batch_invariant"}),
]


def suite_of(part: type, **declared: Any) -> type[AttentionSuite]:
    return type(part.__name__, (Standard,), {"part": part, **declared})


def failed(suite: type[AttentionSuite], keyword: str = "") -> set[str]:
    return {outcome.test for outcome in run_suite(suite, keyword) if outcome.result == "failed"}


@pytest.mark.parametrize(("part", "tests"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_backend_is_caught_by_the_test_of_what_it_breaks(part: type, tests: set[str]) -> None:
    assert failed(suite_of(part)) == tests


def test_a_wrong_result_is_caught_by_every_test_of_results() -> None:
    assert {"test_matches_reference", "test_head_sizes", "test_window", "test_shared_pages"} <= failed(suite_of(Wrong))


def test_overflow_is_caught_where_scores_are_large() -> None:
    """Overflows computes what it is asked to, otherwise."""
    assert failed(suite_of(Overflows), "matches or head_sizes or large_scores or verify") == {"test_large_scores"}


def test_offsets_of_32_bits_are_caught() -> None:
    suite = suite_of(Offsets32Bits, grid="normal", dtypes=("float16",), head_sizes=(64,))
    assert failed(suite, "past or matches") == {"test_entries_past_two_to_the_31"}


@pytest.mark.parametrize(("part", "claim"), [(Int8, "int8"), (RowByRow, "batch_invariant")])
def test_right_ones_pass_what_they_claim(part: type, claim: str) -> None:
    outcomes = run_suite(suite_of(part, claims=(claim,)))
    assert not [outcome for outcome in outcomes if outcome.result == "failed"]
    test = {"int8": "test_quantized_cache", "batch_invariant": "test_batch_invariant"}[claim]
    assert {o.case for o in outcomes if o.test == test and o.result == "passed"}


def test_every_standard_test_catches_something() -> None:
    elsewhere = {"test_large_scores", "test_entries_past_two_to_the_31", "test_does_not_synchronise", "test_capturable"}
    base = {"test_serves_what_is_declared", "test_standard_tests_stand"}
    assert set().union(elsewhere, base, *(tests for _, tests in BROKEN)) == AttentionSuite.standard_tests()


def test_claims_that_are_refused_fail() -> None:
    for declared in ({"claims": ("batch_invariant",)}, {"kv_dtypes": ("int8",)}, {"dtypes": ("float32", "int32")}):
        assert "test_serves_what_is_declared" in failed(suite_of(Reference, **declared), "declared")


class Synchronises(Reference):
    def forward(self, q: Tensor, *others: Any) -> Tensor:
        q.sum().item()
        return super().forward(q, *others)


class RecordsLengths(Reference):
    """Takes this step's lengths to the host, so that a graph can't follow."""

    capturable = True

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Any) -> TorchPlan:
        return super().plan(replace(rows, kv_len=torch.tensor(rows.kv_len.tolist()).to(rows.kv_len)), layer, workspace)


@pytest.mark.gpu
def test_what_only_a_device_shows_is_caught() -> None:
    assert failed(suite_of(Synchronises, device="cuda")) == {"test_does_not_synchronise"}
    assert failed(suite_of(RecordsLengths, device="cuda"), "capturable") == {"test_capturable"}
