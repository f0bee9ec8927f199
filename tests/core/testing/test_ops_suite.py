"""The ops suite catches what it is for: deliberately broken ops for each invariant, and the tests that see it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pegboard.contracts.attention import KVLayout, LayerCache
from pegboard.contracts.ops import Located, Norm, Rope, SlotTables
from pegboard.ops import TorchOps
from pegboard.testing import OpsSuite, run_suite

replace = msgspec.structs.replace


class ForgetsTheDropped(TorchOps):
    def locate(self, slots: Tensor, advance: Tensor, tables: SlotTables, width: int) -> Located:
        return super().locate(slots, advance, replace(tables, dropped=torch.zeros_like(tables.dropped)), width)


class IdleRowsGrow(TorchOps):
    def locate(self, slots: Tensor, advance: Tensor, tables: SlotTables, width: int) -> Located:
        return super().locate(slots, torch.ones_like(advance), tables, width)


class NoEps(TorchOps):
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return super().norm(x, replace(norm, eps=1e-12), residual)


class NoOffset(TorchOps):
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return super().norm(x, replace(norm, offset=0.0), residual)


class ForgetsResidual(TorchOps):
    """Of a norm; project adds its own."""

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return super().norm(x, norm)


class NormsInHalf(TorchOps):
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        scaled = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight + norm.offset)
        return scaled if residual is None else scaled + residual


class AddsInPlace(TorchOps):
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        out = super().norm(x, norm)
        return out if residual is None else out + residual.add_(out).sub_(out)


class OneGeluForAll(TorchOps):
    def gated(self, x: Tensor, activation: Any) -> Tensor:
        return super().gated(x, "gelu_tanh" if activation == "gelu" else activation)


class EmbedsTheNext(TorchOps):
    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        return super().embed((ids + 1) % weight.shape[0], weight)


class ActivatesLast(TorchOps):
    def project(self, x: Tensor, linear: Any, **parts: Any) -> Tensor:
        activation, residual = parts.pop("activation", None), parts.pop("residual", None)
        out = super().project(x, linear, **parts)
        if activation is None:
            return out if residual is None else out + residual
        if residual is None:
            return self.gated(out, activation)
        return self.gated(out + residual.repeat(1, 2), activation)


class TakesTheWeight(TorchOps):
    """Fuses around a dense weight, split or not."""

    def project(self, x: Tensor, linear: Any, **parts: Any) -> Tensor:
        if linear.weight is None or parts.get("norm") or parts.get("activation"):
            return super().project(x, linear, **parts)
        out = functional.linear(x, linear.weight, linear.bias)
        residual = parts.get("residual")
        return out if residual is None else out + residual


class NeoxOnly(TorchOps):
    def rope_write(self, qkv: Tensor, heads: Any, positions: Tensor, rope: Rope | None, *others: Any) -> Any:
        rope = rope and replace(rope, interleaved=False)
        return super().rope_write(qkv, heads, positions, rope, *others)


class ConsecutivePositions(TorchOps):
    def rope_write(self, qkv: Tensor, heads: Any, positions: Tensor, *others: Any) -> Any:
        return super().rope_write(qkv, heads, positions[0] + torch.arange(positions.shape[0]), *others)


class AlwaysTurns(TorchOps):
    def rope_write(self, qkv: Tensor, heads: Any, positions: Tensor, rope: Rope | None, *others: Any) -> Any:
        if rope is None:
            angle = torch.ones(512, heads[2] // 2)
            rope = Rope(cos=angle.cos(), sin=angle.sin())
        return super().rope_write(qkv, heads, positions, rope, *others)


class TurnsFirst(TorchOps):
    """Norms q and k after the rotation."""

    def rope_write(
        self,
        qkv: Tensor,
        heads: Any,
        positions: Tensor,
        rope: Any,
        cache: LayerCache,
        index: Tensor,
        q_norm: Any = None,
        k_norm: Any = None,
    ) -> Any:
        q, k, v = super().rope_write(qkv, heads, positions, rope, cache, index)
        q = q if q_norm is None else self.norm(q, q_norm)
        k = k if k_norm is None or k is None else self.norm(k, k_norm)
        return q, k, v


class WritesTheUnturned(TorchOps):
    def rope_write(self, qkv: Tensor, heads: Any, positions: Tensor, rope: Any, cache: Any, index: Any, *n: Any) -> Any:
        found = super().rope_write(qkv, heads, positions, rope, cache, index, *n)
        super().rope_write(qkv, heads, positions, None, cache, index, *n)
        return found


class WritesAWholePage(TorchOps):
    def rope_write(self, qkv: Tensor, heads: Any, positions: Tensor, rope: Any, cache: Any, index: Any, *n: Any) -> Any:
        for tensor in cache.tensors.values():
            tensor[index // cache.page_size] = 0
        return super().rope_write(qkv, heads, positions, rope, cache, index, *n)


class CopiesKeysOnly(TorchOps):
    def copy_pages(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        super().copy_pages(replace(cache, tensors={"k": cache.tensors["k"]}), source, target)


class MovesOneByOne(TorchOps):
    def move_entries(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        for one, other in zip(source.flip(0), target.flip(0), strict=True):
            super().move_entries(cache, one[None], other[None])


class Offsets32Bits(TorchOps):
    def rope_write(self, qkv: Tensor, heads: Any, positions: Tensor, rope: Any, cache: Any, index: Any, *n: Any) -> Any:
        entry = heads[1] * heads[2]
        return super().rope_write(qkv, heads, positions, rope, cache, index % ((1 << 31) // entry), *n)


class TurnsInPlace(TorchOps):
    def rope_write(self, qkv: Tensor, heads: Any, *others: Any) -> Any:
        found = super().rope_write(qkv, heads, *others)
        qkv[:, : heads[0] * heads[2]] = found[0].flatten(1)
        return found


class Widens(TorchOps):
    def gated(self, x: Tensor, activation: Any) -> Tensor:
        return super().gated(x, activation).double()


class ReadsAsIfContiguous(TorchOps):
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        if x.dim() == 2:
            x = x.as_strided(x.shape, (x.shape[1], 1))
        return super().norm(x, norm, residual)


class MixesRows(TorchOps):
    def gated(self, x: Tensor, activation: Any) -> Tensor:
        return super().gated(x, activation) + 0 * x.sum()


class ManyRowsDiffer(TorchOps):
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        out = super().norm(x, norm, residual)
        return out * (1 + 1e-6) if x.shape[0] > 50 else out


class Drifts(TorchOps):
    calls = 0

    def gated(self, x: Tensor, activation: Any) -> Tensor:
        self.calls += 1
        return super().gated(x, activation) * (1 + 1e-6 * (self.calls % 2))


class Int8Ops(TorchOps):
    """Right ones that quantize: V turned, bytes in offset binary, a scale an entry and head."""

    steps = 127

    def writes(self, layout: KVLayout) -> bool:
        return super().writes(layout) or layout.name == "hnd-int8"

    def rope_write(self, qkv: Tensor, heads: Any, positions: Tensor, rope: Any, cache: Any, index: Any, *n: Any) -> Any:
        if "k_scale" not in cache.tensors:
            return super().rope_write(qkv, heads, positions, rope, cache, index, *n)
        spare = {x: torch.zeros(index.shape[0], 1, *heads[1:], dtype=qkv.dtype) for x in "kv"}
        plain = replace(cache, tensors=spare)
        q, _, _ = super().rope_write(qkv, heads, positions, rope, plain, torch.arange(index.shape[0]), *n)
        page, offset = index // cache.page_size, index % cache.page_size
        for name, tensor in spare.items():
            values = tensor[:, 0].float()
            scale = values.abs().amax(-1, keepdim=True) / self.steps
            payload = ((values / scale).round().clamp(-127, 127) + 128).to(torch.uint8)
            entries = cache.tensors[name].transpose(1, 2) if name == "k" else cache.tensors[name].permute(0, 3, 1, 2)
            entries[page, offset] = payload
            cache.tensors[f"{name}_scale"].transpose(1, 2)[page, offset] = scale[..., 0]
        return q, None, None

    def move_entries(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        if "k_scale" not in cache.tensors:
            return super().move_entries(cache, source, target)
        (page, offset), (to_page, to_offset) = ((x // 16, x % 16) for x in (source, target))
        for name, tensor in cache.tensors.items():
            entries = tensor.permute(0, 3, 1, 2) if name == "v" else tensor.transpose(1, 2)
            entries[to_page, to_offset] = entries[page, offset].clone()
        return None


class Saturates(Int8Ops):
    steps = 200


class Standard(OpsSuite):
    part = TorchOps
    grid = "small"
    head_sizes = (64, 80)
    hidden_sizes = (64,)


BROKEN: list[tuple[type, set[str]]] = [
    (ForgetsTheDropped, {"test_locate"}),
    (IdleRowsGrow, {"test_locate"}),
    (NoEps, {"test_norm", "test_norm_of_large_and_small_values"}),
    (NoOffset, {"test_norm", "test_project", "test_q_and_k_norms_come_before_the_rotation"}),
    (ForgetsResidual, {"test_norm"}),
    (AddsInPlace, {"test_inputs_are_not_changed"}),
    (OneGeluForAll, {"test_gated_activation"}),
    (EmbedsTheNext, {"test_embed"}),
    (ActivatesLast, {"test_project"}),
    (TakesTheWeight, {"test_project_lets_a_linear_reduce"}),
    (NeoxOnly, {"test_rope"}),
    (
        ConsecutivePositions,
        {
            "test_rope",
            "test_q_and_k_norms_come_before_the_rotation",
            "test_writes_where_write_index_says",
            "test_strided_inputs",
            "test_batch_invariant",
        },
    ),
    (AlwaysTurns, {"test_without_rope_nothing_turns"}),
    (TurnsFirst, {"test_q_and_k_norms_come_before_the_rotation"}),
    (WritesTheUnturned, {"test_writes_where_write_index_says"}),
    (WritesAWholePage, {"test_writes_where_write_index_says"}),
    (Saturates, {"test_writes_where_write_index_says"}),
    (CopiesKeysOnly, {"test_copy_pages"}),
    (MovesOneByOne, {"test_move_entries"}),
    (TurnsInPlace, {"test_inputs_are_not_changed"}),
    (Widens, {"test_results_have_the_dtype_of_x"}),
    (ReadsAsIfContiguous, {"test_strided_inputs"}),
    (MixesRows, {"test_a_broken_row_stays_alone"}),
    (ManyRowsDiffer, {"test_batch_invariant"}),
    (Drifts, {"test_repeats_itself", "test_batch_invariant"}),
]


def suite_of(part: type, **declared: Any) -> type[OpsSuite]:
    return type(part.__name__, (Standard,), {"part": part, **declared})


def failed(suite: type[OpsSuite], keyword: str = "") -> set[str]:
    return {outcome.test for outcome in run_suite(suite, keyword) if outcome.result == "failed"}


@pytest.mark.parametrize(("part", "tests"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_broken_ops_are_caught_by_the_test_of_what_they_break(part: type, tests: set[str]) -> None:
    assert failed(suite_of(part)) == tests


def test_norms_in_half_precision_are_caught() -> None:
    found = failed(suite_of(NormsInHalf, dtypes=("float16",)), "test_norm")
    assert found == {"test_norm_of_large_and_small_values"}


def test_offsets_of_32_bits_are_caught() -> None:
    suite = suite_of(Offsets32Bits, grid="normal", dtypes=("float16",))
    assert failed(suite, "past or write_index") == {"test_entries_past_two_to_the_31"}


def test_right_ones_that_quantize_pass() -> None:
    suite = suite_of(Int8Ops, layouts=("nhd", "hnd-int8"))
    outcomes = run_suite(suite)
    assert not [outcome for outcome in outcomes if outcome.result == "failed"]
    assert "test_writes_where_write_index_says[float32-64-hnd-int8]" in {
        o.case for o in outcomes if o.result == "passed"
    }


def test_what_is_declared_must_be_written() -> None:
    assert failed(suite_of(TorchOps, layouts=("nhd", "hnd-int8")), "writes_a_layout") == {"test_writes_a_layout"}
    assert failed(suite_of(TorchOps, layouts=("hnd",)), "writes_a_layout") == {"test_writes_a_layout"}
    suite = suite_of(TorchOps, activations=("silu", "relu2"))
    assert failed(suite, "declared") == {"test_serves_what_is_declared"}


def test_every_standard_test_catches_something() -> None:
    elsewhere = {"test_entries_past_two_to_the_31", "test_writes_a_layout", "test_does_not_synchronise"}
    base = {"test_serves_what_is_declared", "test_standard_tests_stand"}
    assert set().union(elsewhere, base, *(tests for _, tests in BROKEN)) == OpsSuite.standard_tests()


class Waits(TorchOps):
    def gated(self, x: Tensor, activation: Any) -> Tensor:
        x.sum().item()
        return super().gated(x, activation)


@pytest.mark.gpu
def test_waiting_for_the_device_is_caught() -> None:
    assert failed(suite_of(Waits, device="cuda")) == {"test_does_not_synchronise"}
