"""FlashDecoding against the definition in float64: on a CUDA device, and on CPU under Triton's interpreter.

The interpreter is chosen when a kernel is defined, so it has a process of its own (`test_under_the_interpreter`)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionLayer, AttentionNeed, LayerCache
from pegboard.contracts.batch import Bounds, Rows
from pegboard.contracts.device import DeviceFacts
from pegboard.dtypes import dtype_name, torch_dtype

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
RUNS = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or Triton's interpreter")
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="bfloat16 and large shapes: needs a CUDA device")
#: Of the largest value; 16-bit weights of the softmax are the greatest error, rounding of the cache is in the oracle.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
MULTIPROCESSORS = 132 if DEVICE == "cuda" else 4


def head_layer(heads: int = 4, kv_heads: int = 2, size: int = 32, **rest: object) -> AttentionLayer:
    return AttentionLayer(query_heads=heads, kv_heads=kv_heads, head_size=size, scale=size**-0.5, **rest)


@dataclass
class Step:
    backend: Any
    layer: AttentionLayer
    q: Tensor
    cache: LayerCache
    rows: Rows
    workspace: dict[str, Tensor]
    sinks: Tensor | None

    def forward(self) -> Tensor:
        plan = self.backend.plan(self.rows, self.layer, self.workspace)
        return self.backend.forward(self.q, None, None, self.cache, plan, self.sinks)


@dataclass
class Case:
    """One step: rows of (queries, kv_len). Entries and pages that nobody may read hold NaN."""

    rows: list[tuple[int, int]]
    layer: AttentionLayer
    dtype: torch.dtype = torch.float16
    kv_dtype: str | None = None
    page: int = 16
    #: For each row the parent of each of its queries (-1: none), for a tree.
    parents: list[list[int]] | None = None
    #: Added to the true greatest kv_len: the host's bound may be loose.
    slack: int = 0
    invariant: bool = False
    multiprocessors: int = MULTIPROCESSORS
    seed: int = 0
    #: Keys grow with their place, so that the greatest score comes late.
    rising: bool = False

    @property
    def kv(self) -> str:
        return self.kv_dtype or dtype_name(self.dtype)

    def need(self) -> AttentionNeed:
        capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 0)
        return AttentionNeed(
            device=DeviceFacts(type="cuda", capability=capability),
            dtype=dtype_name(self.dtype),
            kv_dtype=self.kv,
            page_size=self.page,
            layers=(self.layer,),
            phase="decode",
            max_query=8 if self.invariant else max(n for n, _ in self.rows),
            max_rows=max(16, len(self.rows)),
            max_length=max(4096, *(kv for _, kv in self.rows)),
            ancestors=self.parents is not None,
            batch_invariant=self.invariant,
        )

    def numbers(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [n, H, D], k and v [kv_len, K, D] in float64: of the row alone, whatever the others are."""
        n, kv = self.rows[row]
        layer, generator = self.layer, torch.Generator().manual_seed(self.seed * 1000 + row)
        made = [
            torch.randn(count, heads, layer.head_size, generator=generator, dtype=torch.float32)
            for count, heads in ((n, layer.query_heads), (kv, layer.kv_heads), (kv, layer.kv_heads))
        ]
        made[2] *= torch.rand(kv, layer.kv_heads, 1, generator=generator) * 30 + 1e-3  # scales far apart
        if self.rising:
            made[1] *= torch.linspace(0.1, 2, kv)[:, None, None]
        q, k, v = (x.to(self.dtype).double() for x in made)
        return q, k, v

    def stored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[entries, K, D] -> what the quantized cache holds of it, and its scales [entries, K]; see quantized_kv."""
        top = 127.0 if self.kv == "int8" else 448.0
        scale = (x.abs().amax(-1) / top).clamp(min=2.0**-100).float()
        ratio = x / scale.double()[..., None]
        if self.kv == "int8":
            return (ratio.round().clamp(-127, 127) + 128).to(torch.uint8), scale
        return ratio.float().to(torch.float8_e4m3fn), scale

    def widened(self, x: Tensor) -> Tensor:
        if self.kv_dtype is None:
            return x
        held, scale = self.stored(x)
        return (held.double() - (128 if self.kv == "int8" else 0)) * scale.double()[..., None]

    def bits(self, row: int) -> list[int]:
        found: list[int] = []
        for i, parent in enumerate((self.parents or [])[row]):
            found.append((found[parent] if parent >= 0 else 0) | 1 << i)
        return found

    def visible(self, row: int) -> Tensor:
        """[n, kv_len] by the definition."""
        n, kv = self.rows[row]
        window = self.layer.window or 1 << 40
        entry, query = torch.arange(kv), torch.arange(n)[:, None]
        if self.parents is None:
            return (entry <= kv - n + query) & (entry > kv - n + query - window)
        bits = self.bits(row)
        own = entry - (kv - n)
        seen = torch.tensor([[o < 0 or bool(bits[i] >> o & 1) for o in own.tolist()] for i in range(n)])
        depth = torch.tensor([b.bit_count() - 1 for b in bits])
        return seen & ((own >= 0) | (entry > kv - n + depth[:, None] - window))

    def expected(self, row: int, sinks: Tensor | None, kv: int | None = None) -> Tensor:
        """[n, H, D] in float64; of the first `kv` entries, when the row is shorter than it was made."""
        layer = self.layer
        q, k, v = self.numbers(row)
        if kv is not None:
            shorter = replace(self, rows=[(n, kv) for n, _ in self.rows])
            k, v = k[:kv], v[:kv]
        else:
            shorter = self
        group = layer.query_heads // layer.kv_heads
        k, v = (self.widened(x).repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("nhd,ehd->hne", q, k) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        scores = scores.masked_fill(~shorter.visible(row), -torch.inf)
        if sinks is not None:
            column = sinks.double().cpu()[:, None, None].expand(-1, q.shape[0], 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        return torch.einsum("hne,ehd->nhd", weights, v)

    def build(self) -> Step:
        from pegboard_attention.flash_decoding import FlashDecoding

        layer, size = self.layer, self.page
        need = self.need()
        assert not FlashDecoding.refusals(need, None)
        backend = FlashDecoding(need, multiprocessors=self.multiprocessors, interpreted=INTERPRETED)
        layout = FlashDecoding.layouts(need, layer, None)[0]
        width = max(max(-(-kv // size) for _, kv in self.rows), 1)
        generator = torch.Generator().manual_seed(self.seed)
        table = (torch.randperm(len(self.rows) * width, generator=generator) + 1).view(len(self.rows), width)
        tensors = {}
        for spec in layout.tensors:
            dtype = torch_dtype(spec.dtype)
            poison = torch.nan if dtype.is_floating_point else 255
            tensors[spec.name] = torch.full((table.numel() + 1, *spec.shape), poison, dtype=torch.float32).to(dtype)
        starts = [0]
        for row, (n, kv) in enumerate(self.rows):
            starts.append(starts[-1] + n)
            lowest = 0 if layer.window is None else max(0, kv - n - layer.window + 1)
            table[row, : lowest // size] = 0  # dropped from the window
            _, k, v = self.numbers(row)
            entry = torch.arange(lowest, kv)
            page, inside = table[row, entry // size], entry % size
            for name, x in (("k", k[lowest:]), ("v", v[lowest:])):
                if self.kv_dtype is None:
                    tensors[name][page, inside] = x.to(self.dtype)
                    continue
                held, scale = self.stored(x)
                tensors[f"{name}_scale"][page, :, inside] = scale
                target = tensors[name].view(torch.uint8)
                if name == "k":
                    target[page, :, inside] = held.view(torch.uint8)
                else:
                    target[page, :, :, inside] = held.view(torch.uint8)
        cache = LayerCache(
            layout=layout, group=0, page_size=size, tensors={name: t.to(DEVICE) for name, t in tensors.items()}
        )
        lengths = [n for n, _ in self.rows]
        q = torch.cat([self.numbers(row)[0] for row in range(len(self.rows))]).to(self.dtype).to(DEVICE)
        packed = torch.full((starts[-1], layer.query_heads + 3, layer.head_size), torch.nan).to(q)
        packed[:, 1 : 1 + layer.query_heads] = q  # q is a part of a fused projection's result
        ancestors = None
        if self.parents is not None:
            flat = [b for row in range(len(self.rows)) for b in self.bits(row)]
            ancestors = torch.tensor(flat, dtype=torch.int64, device=DEVICE)
        rows = Rows(
            query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            kv_len=torch.tensor([kv for _, kv in self.rows], dtype=torch.int32, device=DEVICE),
            page_table=table.to(torch.int32).to(DEVICE),
            row_slot=torch.arange(len(self.rows), device=DEVICE),
            ancestors=ancestors,
            bounds=Bounds(
                rows=len(self.rows),
                tokens=starts[-1],
                max_query=max(lengths),
                min_query=min(lengths),
                max_kv=max(kv for _, kv in self.rows) + self.slack,
            ),
        )
        sinks = None
        if layer.sinks:
            sinks = torch.randn(layer.query_heads, generator=generator).to(DEVICE)
        workspace = {
            spec.name: torch.full(spec.shape, torch.nan, dtype=torch_dtype(spec.dtype), device=DEVICE)
            for spec in backend.workspace()
        }
        return Step(backend, layer, packed[:, 1 : 1 + layer.query_heads], cache, rows, workspace, sinks)

    def run(self) -> tuple[Tensor, Tensor | None]:
        """-> out [T, H, D] and sinks [H]"""
        step = self.build()
        return step.forward(), step.sinks

    def check(self) -> None:
        out, sinks = self.run()
        assert out.is_contiguous()
        at = 0
        for row, (n, kv) in enumerate(self.rows):
            mine = out[at : at + n].double().cpu()
            at += n
            if kv == 0:
                assert torch.equal(mine, torch.zeros_like(mine))
                continue
            right = self.expected(row, sinks)
            error = (mine - right).norm() / right.norm()
            assert error < TOLERANCE[self.dtype], f"row {row}: {error:.2e}"


RAGGED = [(1, 1), (1, 16), (1, 37), (1, 64), (1, 129), (1, 0), (1, 200)]


@RUNS
class TestDecode:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("page", [16, 64])
    def test_ragged_rows(self, dtype: torch.dtype, page: int) -> None:
        Case(RAGGED, head_layer(), dtype, page=page).check()

    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (7, 1), (9, 3), (40, 2), (71, 1)])
    def test_any_ratio_of_heads(self, heads: int, kv_heads: int) -> None:
        Case([(1, 70), (1, 9)], head_layer(heads, kv_heads, 16), torch.float32).check()

    @pytest.mark.parametrize("size", [16, 40, 64, 72, 80, 96, 128, 256])
    def test_head_sizes(self, size: int) -> None:
        Case([(1, 70), (1, 33)], head_layer(2, 1, size), page=32).check()

    @pytest.mark.parametrize("window", [1, 16, 50, 1000])
    def test_window(self, window: int) -> None:
        Case(RAGGED, head_layer(window=window)).check()
        Case([(3, 100), (2, 9)], head_layer(window=window)).check()

    def test_softcap_and_sinks(self) -> None:
        Case(RAGGED, head_layer(softcap=1.5)).check()
        Case(RAGGED, head_layer(sinks=True)).check()
        Case(RAGGED, head_layer(sinks=True, softcap=3.0, window=40)).check()

    def test_more_rows_than_programs(self) -> None:
        """Only the long row is split."""
        Case([(1, 20)] * 9 + [(1, 1500)], head_layer(2, 1, 16), multiprocessors=1).check()

    def test_full_device_of_short_rows_is_not_split(self) -> None:
        Case([(1, 150 + i) for i in range(6)], head_layer(2, 1, 16), multiprocessors=1).check()

    def test_more_splits_than_are_merged_at_once(self) -> None:
        Case([(1, 1250), (1, 40)], head_layer(2, 1, 128), torch.float32, multiprocessors=64, rising=True).check()

    def test_loose_bound(self) -> None:
        Case(RAGGED, head_layer(), slack=700).check()


@RUNS
class TestVerify:
    @pytest.mark.parametrize("queries", [2, 5, 8])
    def test_chains(self, queries: int) -> None:
        Case([(queries, queries), (queries, 50), (1, 77), (queries, 130), (1, 0)], head_layer(6, 2, 16)).check()

    def test_chain_of_more_pairs_than_a_tile(self) -> None:
        Case([(40, 150), (3, 20), (33, 33)], head_layer(4, 1, 16)).check()

    def test_trees(self) -> None:
        tree = [-1, 0, 0, 1, 1, 2, 4]
        wide = [-1, *(max(0, i // 3) for i in range(62))]
        Case([(7, 60), (7, 7)], head_layer(4, 2, 16), parents=[tree, tree]).check()
        Case([(63, 140)], head_layer(4, 2, 16), parents=[wide]).check()

    def test_trees_with_a_window(self) -> None:
        tree = [-1, 0, 0, 1, 1, 2, 4]
        Case([(7, 60), (7, 19)], head_layer(4, 2, 16, window=12), parents=[tree, tree]).check()


@RUNS
class TestQuantized:
    @pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("page", [16, 64, 128])
    def test_ragged_rows(self, kv_dtype: str, page: int) -> None:
        Case(RAGGED, head_layer(), kv_dtype=kv_dtype, page=page).check()

    @pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
    def test_modes(self, kv_dtype: str) -> None:
        Case([(4, 90), (1, 3)], head_layer(6, 2, 40, softcap=4.0, window=33), kv_dtype=kv_dtype).check()
        Case([(1, 90), (1, 3)], head_layer(6, 2, 16, sinks=True), torch.float32, kv_dtype=kv_dtype).check()


@RUNS
class TestInvariance:
    def test_a_row_alone_and_among_others(self) -> None:
        layer = head_layer(4, 2, 16)
        alone, _ = Case([(1, 900)], layer, invariant=True).run()
        others = [(1, 900), (1, 3), (8, 3000), (2, 0)] + [(1, 40 * i + 1) for i in range(8)]
        among, _ = Case(others, layer, invariant=True).run()
        assert torch.equal(alone[0], among[0])
        Case(others, layer, invariant=True).check()

    def test_the_same_twice(self) -> None:
        case = Case([(1, 900), (1, 77)], head_layer())
        assert torch.equal(case.run()[0], case.run()[0])


@ON_GPU
class TestOnTheDevice:
    @pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("page", [16, 64])
    @pytest.mark.parametrize("size", [64, 128, 256])
    def test_bfloat16_of_long_rows(self, kv_dtype: str | None, page: int, size: int) -> None:
        rows = [(1, 5000), (1, 17), (1, 0), (1, 2048)]
        Case(rows, head_layer(8, 2, size), torch.bfloat16, kv_dtype=kv_dtype, page=page).check()

    def test_verify_in_bfloat16(self) -> None:
        Case([(8, 3000), (1, 64), (5, 70)], head_layer(32, 8, 128), torch.bfloat16, page=64).check()
        tree = [-1, *(i // 2 for i in range(62))]
        Case([(63, 1500)], head_layer(32, 8, 128), torch.bfloat16, page=64, parents=[tree]).check()

    @pytest.mark.parametrize("rows", [2, 300])
    def test_a_captured_step_follows_the_lengths(self, rows: int) -> None:
        """Recorded once for bounds, replayed for other lengths; no launch depends on what the host knows."""
        case = Case([(1, 1300)] * rows, head_layer(8, 2, 64), page=64)
        step = case.build()
        step.forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step.forward()
        for lengths in ([1300, 5], [64, 0], [1, 1299]):
            step.rows.kv_len.fill_(17)
            step.rows.kv_len[:2] = torch.tensor(lengths, dtype=torch.int32)
            out.fill_(torch.nan)
            graph.replay()
            for row, kv in enumerate([*lengths, 17][: min(rows, 3)]):
                right = case.expected(row, None, kv) if kv else torch.zeros(1, 8, 64)
                assert (out[row].double().cpu() - right[0]).norm() <= TOLERANCE[case.dtype] * right.norm()


def test_refusals_say_what_is_wrong() -> None:
    from pegboard_attention.flash_decoding import FlashDecoding

    good = Case([(1, 5)], head_layer()).need()
    assert not FlashDecoding.refusals(good, None)

    def refused(**changes: object) -> str:
        import msgspec

        return "\n".join(FlashDecoding.refusals(msgspec.structs.replace(good, **changes), None))

    assert "prefill" in refused(phase="prefill")
    assert "compute capability 8.0 or more, not cpu" in refused(device=DeviceFacts(type="cpu"))
    assert "not in float64" in refused(dtype="float64", kv_dtype="float64")
    assert "not in float32" in refused(kv_dtype="float32")
    assert "at most 64 queries, not 65" in refused(max_query=65)
    assert "score mass" in refused(score_mass=True)
    assert "5 query heads are no multiple of 2" in refused(layers=(head_layer(5, 2),))
    assert "not 20" in refused(layers=(head_layer(size=20),))
    window = head_layer(window=3)
    assert "shorter than trees of 8" in refused(layers=(window,), ancestors=True, max_query=8)


@pytest.mark.skipif(INTERPRETED, reason="is what runs it")
@pytest.mark.long
def test_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
