"""The suite for ops: norm, projection, gated activation, embedding, rotation and the writes into the cache."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from ..contracts.ops import SlotTables
from ..dtypes import torch_dtype
from .conformance import (
    Candidate,
    check,
    compare,
    no_synchronisation,
    normal,
    same_bits,
    unchanged,
)
from .ops_bench import HEADS, INDEX, POSITIONS, looser
from .ops_cache import OpsCacheTests
from .oracles import ops as oracle


class OpsSuite(OpsCacheTests, standard=True):
    """Subclass it, set `part`, `device` and `dtypes`. Ops for another layout than those of `make_layout` override it,
    `read_cache` and `poison_cache`."""

    # -- places

    @pytest.mark.parametrize("page_size", [16, 64])
    def test_locate(self, candidate: Candidate, dtype: str, page_size: int) -> None:
        """Rows in any order, idle ones among them, with entries dropped; lengths at both ends of a page."""
        ops = self.make(candidate, dtype)
        lengths, dropped = [0, 1, page_size - 1, page_size, 5 * page_size + 3, 0], [0, 0, 0, 0, 2 * page_size, 0]
        last_ids, columns = [9, 8, 7, 6, 5, 0], 300
        pages = torch.arange(6 * columns).view(6, columns) * 7 % 1009
        tables = SlotTables(
            lengths=self.index(lengths),
            last_ids=self.index(last_ids),
            pages=pages.to(torch.int32).to(self.device),
            dropped=self.index(dropped),
            page_size=page_size,
        )
        slots, advance = [4, 1, 5, 0, 3, 2, 5], [1, 1, 0, 1, 1, 1, 0]
        for width in (1, 7, columns):
            found = ops.locate(self.index(slots), self.index(advance), tables, width)
            entries = [lengths[slot] - dropped[slot] for slot in slots]
            expected = {
                "ids": [last_ids[slot] for slot in slots],
                "positions": [lengths[slot] for slot in slots],
                "ends": [lengths[slot] + more for slot, more in zip(slots, advance, strict=True)],
                "write_index": [
                    int(pages[slot, entry // page_size]) * page_size + entry % page_size
                    for slot, entry in zip(slots, entries, strict=True)
                ],
                "kv_len": [entry + more for entry, more in zip(entries, advance, strict=True)],
                "page_table": pages[slots, :width].tolist(),
            }
            for name, wanted in expected.items():
                tensor = getattr(found, name)
                kind = torch.int32 if name in ("kv_len", "page_table") else torch.int64
                check(tensor.dtype == kind, f"locate: {name} is {tensor.dtype}, must be {kind}")
                check(tensor.tolist() == wanted, f"locate: {name} is {tensor.tolist()}, must be {wanted}")

    # -- norm, activation, embedding

    def test_norm(self, candidate: Candidate, dtype: str, hidden_size: int) -> None:
        """All of offset, order of rounding and residual; two and three dimensions; an eps that counts."""
        ops = self.make(candidate, dtype, hidden_size=hidden_size)
        for shape, offset, first in product(((1,), (33,), (5, 3)), (0.0, 1.0), (True, False)):
            x = self.random(*shape, hidden_size, dtype=dtype)
            residual = self.random(*shape, hidden_size, dtype=dtype, seed=7)
            norm = self.norm_of(hidden_size, dtype, eps=0.1, offset=offset, round_first=first)
            expected, what = oracle.rms_norm(x, norm), f"norm of {tuple(x.shape)}, offset {offset}, round_first {first}"
            compare(ops.norm(x, norm), expected, looser(dtype), what)
            compare(ops.norm(x, norm, residual), residual.double() + expected, looser(dtype), f"{what}, residual")

    def test_norm_of_large_and_small_values(self, candidate: Candidate, dtype: str) -> None:
        """Squares that leave the range of float16."""
        ops, size = self.make(candidate, dtype), self.hidden_sizes[0]
        x = self.on(normal(4, size) * torch.tensor([[3000.0], [1e-3], [1.0], [300.0]]), dtype)
        norm = self.norm_of(size, dtype, eps=1e-6)
        compare(ops.norm(x, norm), oracle.rms_norm(x, norm), looser(dtype), "norm of rows of very different size")

    def test_gated_activation(self, candidate: Candidate, dtype: str, activation: str) -> None:
        ops = self.make(candidate, dtype, activations=(activation,))
        for rows, width in ((1, 48), (33, 96), (5, 2 * 200)):
            x = self.on(normal(rows, width) * 3, dtype)
            found = ops.gated(x, activation)  # type: ignore[arg-type]
            compare(found, oracle.gated(x, activation), looser(dtype), f"{activation} of {rows} x {width}")

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
                residual=None if residual is None else residual.clone(),
            )
            what = f"project with norm {normed}, activation {active}, residual {added}, bias {bias}"
            compare(found, expected, looser(dtype, 4), what)

    def test_project_lets_a_linear_reduce(self, candidate: Candidate, dtype: str) -> None:
        """Of a linear split along its input the weight is a part: the linear must be called, and the residual added
        once, to the sum."""
        ops, size = self.make(candidate, dtype), self.hidden_sizes[0]
        linear = self.linear_of(size, size, dtype, bias=True, partition="input")
        x, residual = self.random(5, size, dtype=dtype), self.random(5, size, dtype=dtype, seed=9)
        found = ops.project(x, linear, residual=residual.clone())
        compare(found, residual.double() + linear.exact(x), looser(dtype, 4), "project of a linear that reduces")

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
            ops.project(x, linear, norm=norm, residual=residual.clone())  # which is given away
            ops.project(x, wide, norm=norm, activation=self.activations[0], residual=residual.clone())  # type: ignore[arg-type]
            ops.gated(x, self.activations[0])  # type: ignore[arg-type]
            ops.embed(self.index((0, 1)), x)
        cache = self.cache_of(self.written_layout(ops, HEADS[1], head, dtype))
        qkv, rope, head_norm = self.qkv(dtype, head), self.tables(head), self.norm_of(head, dtype)
        positions, index = self.index(POSITIONS), self.index(INDEX)
        tensors = {"qkv": qkv, "positions": positions, "write_index": index, "cos": rope.cos, "sin": rope.sin}
        for norms in ((None, None), (head_norm, head_norm)):
            with unchanged(**tensors, norm_weight=head_norm.weight):
                ops.rope_write(qkv, (*HEADS, head), positions, rope, cache, index, *norms)
        source, target = self.index((0, 1)), self.index((2, 3))
        with unchanged(source=source, target=target):
            ops.copy_pages(cache, source, target)
            ops.move_entries(cache, source, target)

    def test_results_have_the_dtype_of_x(self, candidate: Candidate, dtype: str) -> None:
        ops, size, head = self.make(candidate, dtype), self.hidden_sizes[0], self.head_sizes[0]
        x, kind = self.random(5, size, dtype=dtype), torch_dtype(dtype)
        cache = self.cache_of(self.written_layout(ops, HEADS[1], head, dtype))
        turned = ops.rope_write(
            self.qkv(dtype, head), (*HEADS, head), self.index(POSITIONS), self.tables(head), cache, self.index(INDEX)
        )
        linear = self.linear_of(size, size, dtype)
        results = {
            "norm": ops.norm(x, self.norm_of(size, dtype)),
            "project": ops.project(x, linear, residual=x.clone()),
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
        compare(ops.norm(x, norm), oracle.rms_norm(x, norm), looser(dtype), "norm of a strided x")
        name = self.activations[0]
        found = ops.gated(x, name)  # type: ignore[arg-type]
        compare(found, oracle.gated(x, name), looser(dtype), f"{name} of a strided x")
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
            ("project", lambda rows: ops.project(rows, linear, norm=norm, residual=rows.clone())),
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
        cache = self.cache_of(self.written_layout(ops, HEADS[1], head, dtype))
        qkv, rope, ids = self.qkv(dtype, head), self.tables(head), self.index((0, 1))
        positions, index, others = self.index(POSITIONS), self.index(INDEX), self.index((2, 3))

        def everything() -> None:
            ops.norm(x, norm, x)
            ops.gated(x, self.activations[0])  # type: ignore[arg-type]
            ops.embed(ids, weight)
            ops.rope_write(qkv, (*HEADS, head), positions, rope, cache, index)
            ops.copy_pages(cache, ids, others)
            ops.move_entries(cache, ids, others)

        everything()  # kernels are compiled
        with no_synchronisation(self.device):
            everything()
