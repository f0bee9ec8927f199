"""The quantizer suite catches what it is for: a broken quantizer an invariant, and the tests that see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo
from pegboard.contracts.quantizer import LinearSpec, QuantizerNeed, Shard
from pegboard.linears import DenseParts, read_dense
from pegboard.testing import QuantizerSuite, run_suite
from pegboard.testing.oracles.checkpoints import MemoryCheckpoint
from pegboard_quant.dense import DenseQuantizer
from pegboard_quant.half import can_halve
from pegboard_quant.linears import DenseLinear
from pegboard_quant.options import DenseOptions

replace = msgspec.structs.replace


class Plain(DenseLinear):
    """What the broken ones below change one thing of."""


class Reference(DenseQuantizer):
    made: type[Plain] = Plain

    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> Any:
        return self.finish(self.read(spec, checkpoint, shard))

    def read(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> DenseParts:
        return read_dense(spec, checkpoint, shard, self._dtype, self._device)

    def finish(self, parts: DenseParts) -> Plain:
        return self.made(parts)


# -- what is recognised and read


class TakesAnything(Reference):
    @classmethod
    def refusals(cls, need: QuantizerNeed, options: Any) -> Sequence[str]:
        return super().refusals(replace(need, scheme={}), options)


class NotesOneText(Reference):
    def notes(self) -> Sequence[str]:
        return "saves memory"


class NamesNoBias(Reference):
    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return super().tensor_names(replace(spec, bias=False), names)


class NamesEverything(Reference):
    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(names)


class Unchecked(Reference):
    """Reads whatever is there."""

    def read(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> DenseParts:
        try:
            return super().read(spec, checkpoint, shard)
        except Exception as error:
            raise KeyError(spec.name) from error


class SaysOneShape(Reference):
    def read(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> DenseParts:
        try:
            return super().read(spec, checkpoint, shard)
        except Exception as error:
            raise type(error)(str(error).split(", expected")[0]) from None


class PacksInPlace(Reference):
    def finish(self, parts: DenseParts) -> Plain:
        linear = super().finish(replace(parts, weight=parts.weight.clone()))
        parts.weight.mul_(2)
        return linear


# -- what is held


class CountsWrong(Reference):
    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        return super().bytes_for(spec, stored, shard) + 4 * (shard.size - 1)


class KeepsTwo(Reference):
    class Linear(Plain):
        def __init__(self, parts: DenseParts) -> None:
            super().__init__(parts)
            self.spare = {"original": [parts.weight.clone()]}

    made = Linear


class ForgetsTheTable(DenseQuantizer):
    """Packs, and does not count what a tied head needs beside."""

    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        return super().bytes_for(replace(spec, tied=False), stored, shard)


class SwapsFeatures(Reference):
    class Linear(Plain):
        def __init__(self, parts: DenseParts) -> None:
            super().__init__(parts)
            self.in_features, self.out_features = self.out_features, self.in_features

    made = Linear


# -- what is computed


class ReversesSources(Reference):
    def read(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> DenseParts:
        parts = super().read(spec, checkpoint, shard)
        if len(spec.sources) == 1 or shard.size > 1:
            return parts
        return replace(parts, weight=parts.weight.roll(spec.out_features[0], 0))


class TilesOf128Rows(Reference):
    class Linear(Plain):
        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            out = super().multiply(x, bias)
            out[128:] = 0
            return out

    made = Linear


class OneScaleForAll(Reference):
    """Rounds activations by the greatest of all rows."""

    class Linear(Plain):
        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            step = x.abs().amax() / (1 << 20)
            return super().multiply((x / step).round() * step, bias)

    made = Linear


class DividesByZero(Reference):
    class Linear(Plain):
        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            scale = x.abs().amax(dim=1, keepdim=True)
            return super().multiply(x / scale, None) * scale + (0 if bias is None else bias)

    made = Linear


class MixesRows(Reference):
    class Linear(Plain):
        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            return super().multiply(x, bias) + 0 * x.sum()

    made = Linear


class ScalesInPlace(Reference):
    class Linear(Plain):
        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            out = super().multiply(x, bias)
            x[0] += 1
            return out

    made = Linear


class AddsNoBias(Reference):
    class Linear(Plain):
        def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
            return residual.add_(self.multiply(x, None))

    made = Linear


class KeepsItsResults(Reference):
    """One buffer a number of rows, given out again and again."""

    class made(Plain):
        def __call__(self, x: Tensor) -> Tensor:
            self.kept = getattr(self, "kept", {})
            result = super().__call__(x)
            return self.kept.setdefault(len(x), torch.empty_like(result)).copy_(result)


class RemembersResults(Reference):
    """The same x again is not computed again."""

    class made(Plain):
        def __call__(self, x: Tensor) -> Tensor:
            if not torch.equal(x, getattr(self, "last", x.new_empty(0))):
                self.last, self.result = x.clone(), super().__call__(x)
            return self.result


class ReadsAsIfContiguous(Reference):
    class Linear(Plain):
        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            if x.shape[1] == 256:
                x = x.as_strided(x.shape, (x.shape[1], 1))
            return super().multiply(x, bias)

    made = Linear


class Widens(Reference):
    class Linear(Plain):
        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            return super().multiply(x, bias).double()

    made = Linear


class Drifts(Reference):
    class Linear(Plain):
        calls = 0

        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            self.calls += 1
            return super().multiply(x, bias) * (1 + 2e-7 * self.calls)

    made = Linear


class RowByRow(Reference):
    """A right one."""

    class Linear(Plain):
        noise = 0.0

        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            rows = [super(RowByRow.Linear, self).multiply(row.clone(), bias) for row in x.split(1)]
            return torch.cat(rows) * (1 + self.noise * (x.shape[0] > 8))

    made = Linear

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: Any) -> Sequence[str]:
        return super().refusals(replace(need, batch_invariant=False), options)


class OtherKernelForMany(RowByRow):
    class Linear(RowByRow.Linear):
        noise = 1e-6

    made = Linear


# -- shards


class CutsTheFused(Reference):
    """Takes a rank's rows out of all sources together."""

    def read(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> DenseParts:
        if spec.partition != "output":
            return super().read(spec, checkpoint, shard)
        whole = super().read(replace(spec, partition=None), checkpoint, Shard())
        rows = sum(spec.out_features) // shard.size
        own = slice(shard.rank * rows, (shard.rank + 1) * rows)
        return replace(whole, weight=whole.weight[own], bias=None if whole.bias is None else whole.bias[own])


class BiasOnEveryRank(Reference):
    class Linear(Plain):
        def __call__(self, x: Tensor) -> Tensor:
            out = self.multiply(x, self.bias)
            return out if self._all_reduce is None else self._all_reduce(out)

    made = Linear


class LeavesTheSumToOthers(Reference):
    class Linear(Plain):
        def __call__(self, x: Tensor) -> Tensor:
            return self.multiply(x, self.bias)

    made = Linear


class QuantizesAll(Reference):
    """Rounds what the scheme says to skip."""

    @classmethod
    def refusals(cls, need: QuantizerNeed, options: Any) -> Sequence[str]:
        known = need.scheme.get("quant_method") == "eighths"
        return super().refusals(replace(need, scheme={}) if known else need, options)

    def read(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> DenseParts:
        parts = super().read(spec, checkpoint, shard)
        skipped = not self.rounds_all and spec.name in checkpoint.config.get("quantization_config", {}).get("skip", ())
        return parts if skipped else replace(parts, weight=(parts.weight * 8).round() / 8)

    rounds_all = True


class Skips(QuantizesAll):
    """A right one."""

    rounds_all = False


class Standard(QuantizerSuite):
    options = DenseOptions(pack=False)
    counts = (1, 7, 130)


class Eighths(Standard):
    """A scheme of its own: weights in eighths."""

    scheme = {"quant_method": "eighths", "skip": ["lm_head"]}
    skips = "lm_head"

    def store(self, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        rounded = (weight * 8).round() / 8
        return {"weight": rounded.float()}, rounded


BROKEN: list[tuple[type, set[str]]] = [
    (TakesAnything, {"test_refuses_a_scheme_that_it_does_not_know"}),
    (NotesOneText, {"test_notes_are_texts"}),
    (NamesNoBias, {"test_tensor_names_are_all_that_is_read"}),
    (NamesEverything, {"test_tensor_names_are_all_that_is_read"}),
    (Unchecked, {"test_missing_and_wrong_tensors_are_named"}),
    (SaysOneShape, {"test_missing_and_wrong_tensors_are_named"}),
    (PacksInPlace, {"test_the_checkpoint_is_not_written"}),
    (CountsWrong, {"test_bytes_are_known_before"}),
    (KeepsTwo, {"test_bytes_are_known_before"}),
    (ReversesSources, {"test_fused_sources_and_bias", "test_linear_says_what_it_is"}),
    (TilesOf128Rows, {"test_linear", "test_fused_sources_and_bias"}),
    (OneScaleForAll, {"test_rows_of_very_different_size", "test_a_broken_row_stays_alone"}),
    (DividesByZero, {"test_rows_of_very_different_size"}),
    (MixesRows, {"test_a_broken_row_stays_alone"}),
    (AddsNoBias, {"test_a_residual_is_added"}),
    (KeepsItsResults, {"test_the_result_is_the_callers"}),
    (RemembersResults, {"test_the_result_is_the_callers"}),
    (ScalesInPlace, {"test_x_is_not_changed", "test_repeats_itself", "test_the_result_is_the_callers"}),
    (ReadsAsIfContiguous, {"test_strided_x"}),
    (Drifts, {"test_repeats_itself", "test_the_result_is_the_callers"}),
    (OtherKernelForMany, {"test_batch_invariant"}),
    (CutsTheFused, {"test_output_shards_make_up_the_whole"}),
    (BiasOnEveryRank, {"test_input_shards_sum_to_the_whole"}),
    (LeavesTheSumToOthers, {"test_input_shards_sum_to_the_whole"}),
]


def suite_of(part: type, standard: type[QuantizerSuite] = Standard, **declared: Any) -> type[QuantizerSuite]:
    return type(part.__name__, (standard,), {"part": part, **declared})


def failed(suite: type[QuantizerSuite], keyword: str = "") -> set[str]:
    return {outcome.test for outcome in run_suite(suite, keyword) if outcome.result == "failed"}


@pytest.mark.parametrize(("part", "tests"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_quantizer_is_caught_by_the_test_of_what_it_breaks(part: type, tests: set[str]) -> None:
    assert failed(suite_of(part)) == tests


def test_a_table_that_is_not_counted_is_caught() -> None:
    suite = suite_of(ForgetsTheTable, options=DenseOptions(), storages=("bfloat16",))
    assert failed(suite) == ({"test_bytes_are_known_before"} if can_halve() else set())


def test_wrong_facts_and_dtypes_are_caught_among_others() -> None:
    assert "test_linear_says_what_it_is" in failed(suite_of(SwapsFeatures))
    assert failed(suite_of(Widens), "test_linear") == {"test_linear"}


def test_modules_that_a_scheme_skips() -> None:
    assert failed(suite_of(Skips, Eighths)) == set()
    assert failed(suite_of(QuantizesAll, Eighths)) == {"test_skipped_modules_are_dense"}


def test_right_ones_pass_what_they_claim() -> None:
    for part, claims in ((Reference, ()), (RowByRow, ("batch_invariant",))):
        assert failed(suite_of(part, claims=claims)) == set()
    assert failed(suite_of(Reference, claims=("batch_invariant",)), "declared") == {"test_serves_what_is_declared"}


def test_every_standard_test_catches_something() -> None:
    elsewhere = {"test_skipped_modules_are_dense", "test_does_not_synchronise"}
    base = {"test_serves_what_is_declared", "test_standard_tests_stand"}
    assert set().union(elsewhere, base, *(tests for _, tests in BROKEN)) == QuantizerSuite.standard_tests()


class Waits(Reference):
    class Linear(Plain):
        def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
            x.sum().item()
            return super().multiply(x, bias)

    made = Linear


@pytest.mark.gpu
def test_waiting_for_the_device_is_caught() -> None:
    assert failed(suite_of(Waits, device="cuda")) == {"test_does_not_synchronise"}


def test_an_error_beyond_the_declared_one_fails() -> None:
    class Rounds(Skips):
        @classmethod
        def refusals(cls, need: QuantizerNeed, options: Any) -> Sequence[str]:
            return DenseQuantizer.refusals(need, options)

    assert "test_linear" in failed(suite_of(Rounds), "test_linear")
    assert failed(suite_of(Rounds, error=1.0), "test_linear and not says") == set()


def test_a_checkpoint_in_memory_remembers_what_was_read() -> None:
    blocks = torch.arange(6, dtype=torch.uint8).view(2, 3)
    checkpoint = MemoryCheckpoint(
        {"a": torch.ones(2, 4), "b": torch.ones(3)}, storages={"a": "Q9"}, blocks={"a": blocks}
    )
    assert torch.equal(checkpoint.read_blocks("a"), blocks)
    assert checkpoint.reads == {"a"}
    info = checkpoint.tensors()["a"]
    assert (info.storage, info.shape, info.nbytes) == ("Q9", (2, 4), 6)
    assert checkpoint.read("b", dtype="float64", start=1).shape == (2,)
    with pytest.raises(Exception, match="no tensor 'c'; there are a, b"):
        checkpoint.read("c")
    with pytest.raises(NotImplementedError):
        checkpoint.read_blocks("b")
