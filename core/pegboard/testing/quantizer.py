"""The suite for quantizers: what they recognise, read, hold and compute, whole and in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import msgspec
import pytest
import torch
from torch import Tensor

from ..contracts.quantizer import AddingLinear, Linear, LinearSpec, Quantizer, Shard
from ..dtypes import element_bytes, torch_dtype
from ..errors import CheckpointError
from .conformance import Candidate, check, no_synchronisation, normal, same_bits, unchanged
from .oracles.checkpoints import MemoryCheckpoint
from .quantizer_bench import ERRORS, QuantizerBench


class QuantizerSuite(QuantizerBench, standard=True):
    """Subclass it, set `part`, `device`, `dtypes`, and what the scheme needs. By default the checkpoint is dense; a
    scheme with tensors of its own overrides `store`, or `checkpoint` if it stores blocks."""

    # -- what it recognises and reads

    def test_refuses_a_scheme_that_it_does_not_know(self, candidate: Candidate) -> None:
        need = self.need(self.dtypes[0], scheme={"quant_method": "no-such-scheme", "bits": 3})
        check(bool(candidate.refusals(need)), "quant_method 'no-such-scheme' was not refused")

    def test_notes_are_texts(self, candidate: Candidate, dtype: str) -> None:
        notes = self.make(candidate, dtype).notes()
        texts = not isinstance(notes, str) and all(isinstance(note, str) and note for note in notes)
        check(texts, f"notes gave {notes!r}, must be texts")

    def test_tensor_names_are_all_that_is_read(self, candidate: Candidate, dtype: str) -> None:
        """Stored tensors that are not named would be reported as unused, or missing ones not at all."""
        quantizer = self.make(candidate, dtype)
        for spec in (self.fused(), self.single()):
            checkpoint, _, _ = self.checkpoint(spec)
            named = set(quantizer.tensor_names(spec, checkpoint.tensors()))
            quantizer.linear(spec, checkpoint, Shard())
            unnamed = checkpoint.reads - named
            check(not unnamed, f"{spec.name} read {sorted(unnamed)}, which tensor_names does not name")
            unused = set(checkpoint.stored) - {"unrelated.weight"} - named
            check(not unused, f"{spec.name} does not name {sorted(unused)}")
            check("unrelated.weight" not in named, f"{spec.name} names the tensor of another module")

    def test_missing_and_wrong_tensors_are_named(self, candidate: Candidate, dtype: str) -> None:
        quantizer, spec = self.make(candidate, dtype), self.fused()
        for name in set(self.checkpoint(spec)[0].stored) - {"unrelated.weight"}:
            missing, _, _ = self.checkpoint(spec)
            del missing.stored[name]
            self.hold_error(quantizer, spec, missing, f"without {name}", name)
            wrong, _, _ = self.checkpoint(spec)
            shape = tuple(wrong.stored[name].shape)
            wrong.stored[name] = torch.cat([wrong.stored[name], wrong.stored[name][:1]])
            shapes = str(shape), str(tuple(wrong.stored[name].shape))
            self.hold_error(quantizer, spec, wrong, f"with {name} of a wrong shape", name, *shapes)

    def hold_error(
        self, quantizer: Quantizer, spec: LinearSpec, checkpoint: MemoryCheckpoint, what: str, *said: str
    ) -> None:
        try:
            quantizer.linear(spec, checkpoint, Shard())
        except CheckpointError as error:
            unsaid = [word for word in said if word not in str(error)]
            check(not unsaid, f"{what}: the error does not say {', '.join(unsaid)}: {error}")
        except Exception as error:
            raise AssertionError(f"{what}: raised {type(error).__name__}, must be CheckpointError: {error}") from error
        else:
            raise AssertionError(f"{what}: no error")

    def test_the_checkpoint_is_not_written(self, candidate: Candidate, dtype: str) -> None:
        """Views of a mapped file are read only."""
        quantizer = self.make(candidate, dtype)
        for spec in (self.fused(), self.single()):
            checkpoint, _, _ = self.checkpoint(spec)
            blocks = {f"{name} (blocks)": tensor for name, tensor in checkpoint.blocks.items()}
            with unchanged(**checkpoint.stored, **blocks):
                linear = quantizer.linear(spec, checkpoint, Shard())
                linear(self.inputs(3, dtype))

    # -- what it holds

    @pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
    def test_bytes_are_known_before(self, candidate: Candidate, dtype: str, tied: bool) -> None:
        """`bytes_for` is what the linear says it holds, and for a packed one the table that the model keeps beside;
        what can be seen of it holds no more."""
        quantizer = self.make(candidate, dtype)
        shards: list[tuple[Shard, Literal["output", "input"] | None]] = [(Shard(), None)]
        if not tied:
            shards += [(_rank(0, 2), "output"), (_rank(1, 2), "input")]
        for shard, partition in shards:
            for spec in (self.single(tied=tied), self.fused()) if partition is None else (self.single(),):
                spec = msgspec.structs.replace(spec, partition=partition)
                checkpoint = self.checkpoint(spec)[0]
                told = quantizer.bytes_for(spec, checkpoint.tensors(), shard)
                linear = quantizer.linear(spec, checkpoint, shard)
                table = 0
                if spec.tied and linear.weight is None:
                    table = spec.out_features[0] * spec.in_features * element_bytes(dtype)
                held, what = linear.weight_bytes + table, f"{spec.name}, partition {partition}"
                check(told == held, f"{what}: bytes_for said {told}, held are {held}")
                seen = sum(_tensor_bytes(linear))
                check(seen <= linear.weight_bytes, f"{what}: its tensors have {seen} bytes, said {linear.weight_bytes}")

    def test_linear_says_what_it_is(self, candidate: Candidate, dtype: str) -> None:
        quantizer = self.make(candidate, dtype)
        for spec in (self.fused(), self.single()):
            checkpoint, weight, bias = self.checkpoint(spec)
            linear = quantizer.linear(spec, checkpoint, Shard())
            told, right = (linear.out_features, linear.in_features), (weight.shape[0], weight.shape[1])
            check(told == right, f"{spec.name}: features {told}, must be {right}")
            check(linear.partition is None, f"{spec.name}: partition {linear.partition!r} of a whole linear")
            check((linear.bias is None) == (bias is None), f"{spec.name}: bias is {linear.bias}")
            if linear.weight is not None:
                check(tuple(linear.weight.shape) == right, f"{spec.name}: weight {tuple(linear.weight.shape)}")
                rounded = weight.to(linear.weight.dtype)
                check(torch.equal(linear.weight.cpu(), rounded), f"{spec.name}: `weight` is not what is stored")

    # -- what it computes

    def test_linear(self, candidate: Candidate, dtype: str, count: int) -> None:
        spec = self.single()
        checkpoint, weight, bias = self.checkpoint(spec)
        linear = self.make(candidate, dtype).linear(spec, checkpoint, Shard())
        x = self.inputs(count, dtype)
        found = linear(x.clone())
        check(found.dtype == x.dtype, f"x is {x.dtype}, the result {found.dtype}")
        self.hold(found, x, weight, bias, dtype, f"{count} rows")

    def test_fused_sources_and_bias(self, candidate: Candidate, dtype: str, count: int) -> None:
        spec = self.fused()
        checkpoint, weight, bias = self.checkpoint(spec)
        linear = self.make(candidate, dtype).linear(spec, checkpoint, Shard())
        x = self.inputs(count, dtype)
        self.hold(linear(x.clone()), x, weight, bias, dtype, f"{count} rows of fused sources")

    def test_rows_of_very_different_size(self, candidate: Candidate, dtype: str) -> None:
        """Each row is as exact as if it were alone, rows of zeros included."""
        spec = self.single()
        checkpoint, weight, bias = self.checkpoint(spec)
        linear = self.make(candidate, dtype).linear(spec, checkpoint, Shard())
        for count in (4, 40):
            sizes = torch.tensor([1e-2, 100.0, 0.0, 1.0]).repeat(count // 4)[:, None]
            x = self.inputs(count, dtype) * sizes.to(self.device, torch_dtype(dtype))
            self.hold(linear(x.clone()), x, weight, bias, dtype, f"{count} rows of sizes 0.01 to 100 and 0")

    def test_a_broken_row_stays_alone(self, candidate: Candidate, dtype: str) -> None:
        """NaN in one row must not reach the others."""
        spec = self.fused()
        linear = self.make(candidate, dtype).linear(spec, self.checkpoint(spec)[0], Shard())
        for count in (3, 40):
            x = self.inputs(count, dtype)
            x[1] = torch.nan
            others = [row for row in range(count) if row != 1]
            check(bool(linear(x)[others].isfinite().all()), f"of {count} rows one of NaN reached its neighbours")

    def test_x_is_not_changed(self, candidate: Candidate, dtype: str, count: int) -> None:
        spec = self.fused()
        linear = self.make(candidate, dtype).linear(spec, self.checkpoint(spec)[0], Shard())
        x = self.inputs(count, dtype)
        with unchanged(x=x, weight=linear.weight, bias=linear.bias):
            linear(x)

    def test_the_result_is_the_callers(self, candidate: Candidate, dtype: str, count: int) -> None:
        """Ops add the residual to it in place, and it stays what it is while the linear serves others."""
        spec = self.fused()
        linear = self.make(candidate, dtype).linear(spec, self.checkpoint(spec)[0], Shard())
        x = self.inputs(count, dtype)
        with unchanged(x=x, weight=linear.weight, bias=linear.bias):
            found = linear(x)
            given = found.clone()
            found.add_(1)
            again = linear(x)
        check(same_bits(again, given), "what the caller added to a result came back with the next one")
        check(same_bits(found, given + 1), "a result changed when the linear was called again")

    def test_a_residual_is_added(self, candidate: Candidate, dtype: str, count: int) -> None:
        """Where a linear has `add_to`."""
        for spec in (self.single(), self.fused()):
            checkpoint, weight, bias = self.checkpoint(spec)
            linear = self.make(candidate, dtype).linear(spec, checkpoint, Shard())
            if not hasattr(linear, "add_to"):
                pytest.skip("its linears have no add_to")
            x = self.inputs(count, dtype)
            residual = normal(count, linear.out_features, seed=7).to(x.device, x.dtype)
            with unchanged(x=x, bias=linear.bias):
                found = cast("AddingLinear", linear).add_to(x, residual.clone())
            check(found.dtype == x.dtype, f"x is {x.dtype}, the result {found.dtype}")
            added = residual.cpu().double() + (0 if bias is None else bias)
            self.hold(found, x, weight, added, dtype, f"{count} rows with a residual")

    def test_strided_x(self, candidate: Candidate, dtype: str) -> None:
        spec = self.single()
        checkpoint, weight, bias = self.checkpoint(spec)
        linear = self.make(candidate, dtype).linear(spec, checkpoint, Shard())
        for count in (3, 40):
            x = self.inputs(count, dtype)
            wide = torch.full((2 * count, 3 * self.in_features), torch.nan, dtype=x.dtype, device=x.device)
            wide[::2, self.in_features : 2 * self.in_features] = x
            strided = wide[::2, self.in_features : 2 * self.in_features]
            self.hold(linear(strided), x, weight, bias, dtype, f"{count} rows of a wider tensor")

    def test_repeats_itself(self, candidate: Candidate, dtype: str, count: int) -> None:
        spec = self.fused()
        linear = self.make(candidate, dtype).linear(spec, self.checkpoint(spec)[0], Shard())
        x = self.inputs(count, dtype)
        first = linear(x).clone()
        linear(self.inputs(5, dtype, seed=3))
        check(same_bits(first, linear(x)), "the same rows gave other bits the second time")

    def test_batch_invariant(self, candidate: Candidate, dtype: str) -> None:
        """When the need asks for it: a row's bits do not depend on how many there are."""
        spec = self.fused()
        quantizer = self.make(candidate, dtype, batch_invariant=True)
        linear = quantizer.linear(spec, self.checkpoint(spec)[0], Shard())
        x = self.inputs(130, dtype)
        together = linear(x)
        for start, stop in ((0, 1), (3, 4), (20, 28), (40, 77), (129, 130)):
            part = linear(x[start:stop].clone())
            check(same_bits(part, together[start:stop]), f"rows {start} to {stop} alone gave other bits")

    def test_skipped_modules_are_dense(self, candidate: Candidate, dtype: str) -> None:
        if self.skips is None:
            pytest.skip("the scheme skips nothing")
        spec = self.single(name=self.skips, sources=(self.skips,))
        weight = (normal(spec.out_features[0], spec.in_features, seed=10) / spec.in_features**0.5).float()
        config = {"quantization_config": self.scheme}
        linear = self.make(candidate, dtype).linear(
            spec, MemoryCheckpoint({f"{self.skips}.weight": weight}, config), Shard()
        )
        x = self.inputs(7, dtype)
        exact = x.cpu().double() @ weight.double().T
        off = (linear(x).cpu().double() - exact).norm(dim=1) / exact.norm(dim=1)
        check(
            bool((off <= 4 * ERRORS[dtype]).all()),
            f"{self.skips} is skipped by the scheme: off by {float(off.max()):.3g}",
        )

    # -- shards

    def test_output_shards_make_up_the_whole(self, candidate: Candidate, dtype: str) -> None:
        """A rank has its part of every source, in whole units, with its part of the bias."""
        unit = self.out_features[-1] // 2
        spec = self.fused(partition="output", unit=unit)
        quantizer, x = self.make(candidate, dtype), self.inputs(5, dtype)
        checkpoint, weight, bias = self.checkpoint(spec)
        parts: list[Tensor] = []
        for rank in range(2):
            linear = quantizer.linear(spec, checkpoint, _rank(rank, 2))
            right = sum(self.out_features) // 2
            check(linear.out_features == right, f"rank {rank} has {linear.out_features} features, must be {right}")
            parts.append(linear(x.clone()))
        by_source = [part.split_with_sizes([rows // 2 for rows in self.out_features], dim=1) for part in parts]
        whole = torch.cat([half for halves in zip(*by_source, strict=True) for half in halves], dim=1)
        self.hold(whole, x, weight, bias, dtype, "the parts of two ranks, by source")

    def test_input_shards_sum_to_the_whole(self, candidate: Candidate, dtype: str) -> None:
        """Calling a rank's linear reduces it once, and adds the bias once."""
        spec = self.single(partition="input", bias=True)
        quantizer, x = self.make(candidate, dtype), self.inputs(5, dtype)
        checkpoint, weight, bias = self.checkpoint(spec)
        half, partial = self.in_features // 2, []

        def first(part: Tensor) -> Tensor:
            partial.append(part.clone())
            return part

        def second(part: Tensor) -> Tensor:
            partial.append(part.clone())
            return part + partial[0]

        out = x
        for rank, reduce in enumerate((first, second)):
            linear = quantizer.linear(spec, checkpoint, Shard(rank=rank, size=2, all_reduce=reduce))
            check(linear.partition == "input", f"rank {rank}: partition {linear.partition!r}, must be 'input'")
            check(linear.in_features == half, f"rank {rank} takes {linear.in_features} features, must be {half}")
            out = linear(x[:, rank * half : (rank + 1) * half].clone())
            check(len(partial) == rank + 1, f"rank {rank}: all_reduce was called {len(partial) - rank} times")
        self.hold(out, x, weight, bias, dtype, "the sum of two ranks", times=2)

    # -- the device

    def test_does_not_synchronise(self, candidate: Candidate, dtype: str, count: int) -> None:
        if not self.device.startswith("cuda"):
            pytest.skip("a CPU has nothing to wait for")
        spec = self.fused()
        linear = self.make(candidate, dtype).linear(spec, self.checkpoint(spec)[0], Shard())
        x = self.inputs(count, dtype)
        linear(x)  # kernels are compiled
        with no_synchronisation(self.device):
            linear(x)


def _rank(rank: int, size: int) -> Shard:
    """A rank whose results are looked at before they are reduced."""
    return Shard(rank=rank, size=size, all_reduce=lambda part: part, all_gather=lambda part: part)


def _tensor_bytes(linear: Linear) -> Iterator[int]:
    """Bytes of every plain tensor that a linear's attributes lead to, each memory once."""
    seen: set[int] = set()
    waiting: list[Any] = [linear]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor):
            if thing.layout is torch.strided and not thing.is_mkldnn and thing.data_ptr() not in seen:
                seen.add(thing.data_ptr())
                yield thing.nbytes
        elif id(thing) not in seen and not isinstance(thing, type):
            seen.add(id(thing))
            if isinstance(thing, Mapping):
                waiting.extend(thing.values())
            elif isinstance(thing, list | tuple):
                waiting.extend(thing)
            else:
                waiting.extend(getattr(thing, "__dict__", {}).values())
