"""FlashAttention2 against dense attention in float64; its kernels under Triton's interpreter, compiled ahead of time
without a device, and on a GPU.

Triton decides at import whether functions are interpreted. So what needs the interpreter runs in a process of its own:
`test_under_the_interpreter` runs this file once more.
"""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from pegboard.config import PartChoice  # noqa: E402
from pegboard.contracts.attention import AttentionLayer, AttentionNeed, LayerCache  # noqa: E402
from pegboard.contracts.batch import Bounds, Rows  # noqa: E402
from pegboard.contracts.device import DeviceFacts  # noqa: E402
from pegboard.dtypes import dtype_name  # noqa: E402
from pegboard.errors import PegboardError  # noqa: E402
from pegboard.registry.registry import Registry  # noqa: E402
from pegboard.registry.resolution import resolve  # noqa: E402
from pegboard_attention.flash_attention_2.autograd import flash_attention  # noqa: E402
from pegboard_attention.flash_attention_2.backend import FlashAttention2  # noqa: E402
from pegboard_attention.flash_attention_2.options import FlashAttention2Options  # noqa: E402
from pegboard_attention.flash_attention_2.paths import choose_path, hopper_refusals  # noqa: E402
from pegboard_attention.flash_attention_2.problem import Entries, Forward, Mixing  # noqa: E402
from pegboard_attention.flash_attention_2.schedule import Schedule, make_schedule  # noqa: E402
from pegboard_attention.flash_attention_2.tiling import backward_tilings  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
on_gpu = [pytest.mark.gpu, compiled]
#: Norm of the difference over the norm of the truth.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
KERNELS = [
    pytest.param("hopper", marks=pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.x")),
    "portable",
]


def layer(h: int, k: int, d: int, **facts: Any) -> AttentionLayer:
    return AttentionLayer(query_heads=h, kv_heads=k, head_size=d, scale=d**-0.5, **facts)


def error(found: Tensor, truth: Tensor) -> float:
    found, truth = found.detach().double(), truth.detach()
    return float((found - truth).norm() / truth.norm().clamp(min=1e-30))


@dataclass
class Case:
    """One step: rows of (queries, kv_len), with every entry and page that nobody may read poisoned."""

    rows: list[tuple[int, int]]
    layer: AttentionLayer
    dtype: torch.dtype
    page_size: int = 16
    kernel: str = "auto"
    #: Added to the host's bounds, which may be loose.
    slack: int = 0
    device: str = field(default_factory=lambda: "cpu" if INTERPRETED else "cuda")

    def need(self) -> AttentionNeed:
        capability = torch.cuda.get_device_capability() if self.device == "cuda" else None
        return AttentionNeed(
            device=DeviceFacts(type=self.device, capability=capability),
            dtype=dtype_name(self.dtype),
            kv_dtype=dtype_name(self.dtype),
            page_size=self.page_size,
            layers=(self.layer,),
            phase="prefill",
            max_query=4096,
            max_rows=64,
            max_length=65536,
            batch_invariant=True,
        )

    def backend(self) -> FlashAttention2:
        options = FlashAttention2Options(kernel=self.kernel)
        assert FlashAttention2.refusals(self.need(), options) == []
        return FlashAttention2.create(self.need(), options)

    def build(self) -> tuple[Tensor, LayerCache, Rows, Tensor | None]:
        generator = torch.Generator(self.device).manual_seed(0)
        facts, size = self.layer, self.page_size

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device).to(self.dtype)

        lengths = torch.tensor(self.rows, dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths[:, 0].cumsum(0).int()])
        width = max(-(-kv // size) for _, kv in self.rows) or 1
        pages = len(self.rows) * width + 1
        places = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0))
        table = (places + 1).view(len(self.rows), width)
        stored = [torch.full((pages, size, facts.kv_heads, facts.head_size), math.nan, dtype=self.dtype) for _ in "kv"]
        for row, (n, kv) in enumerate(self.rows):
            lowest = 0 if facts.window is None else max(0, kv - n - facts.window + 1)
            table[row, : lowest // size] = 0  # dropped from the window
            entry = torch.arange(lowest, kv)
            for tensor in stored:
                values = noise(len(entry), facts.kv_heads, facts.head_size).cpu()
                tensor[table[row, entry // size], entry % size] = values
        tokens = int(starts[-1])
        layout = FlashAttention2.layouts(self.need(), facts, None)[0]
        cache = LayerCache(
            layout=layout,
            group=0,
            page_size=size,
            tensors={n: t.to(self.device) for n, t in zip("kv", stored, strict=True)},
        )
        rows = Rows(
            query_start=starts.to(self.device),
            kv_len=lengths[:, 1].contiguous().to(self.device),
            page_table=table.int().to(self.device),
            row_slot=torch.arange(len(self.rows), device=self.device),
            ancestors=None,
            bounds=Bounds(
                rows=len(self.rows),
                tokens=tokens,
                max_query=max(n for n, _ in self.rows) + self.slack,
                min_query=min(n for n, _ in self.rows),
                max_kv=max(kv for _, kv in self.rows) + self.slack,
            ),
        )
        sinks = torch.randn(facts.query_heads, generator=generator, device=self.device) if facts.sinks else None
        return noise(tokens, facts.query_heads, facts.head_size), cache, rows, sinks

    def run(self) -> Tensor:
        q, cache, rows, sinks = self.build()
        backend = self.backend()
        plan = backend.plan(rows, self.layer, {})
        out = backend.forward(q, None, None, cache, plan, sinks)
        assert out.is_contiguous()
        assert torch.equal(out, backend.forward(q, None, None, cache, plan, sinks))  # the plan serves every layer
        return out

    def truth(self) -> tuple[Tensor, Tensor]:
        """(out, lse) by the definition."""
        q, cache, rows, sinks = self.build()
        outs, sums = [], []
        start = 0
        for row, (n, kv) in enumerate(self.rows):
            entry = torch.arange(kv, device=self.device)
            page = rows.page_table[row].long()[entry // self.page_size]
            k, v = (cache.tensors[name][page, entry % self.page_size].double()[None] for name in "kv")
            # What fell out of every query's window is poisoned
            lowest = 0 if self.layer.window is None else max(0, kv - n - self.layer.window + 1)
            k[:, :lowest], v[:, :lowest] = 0, 0
            mixing = Mixing(
                query_heads=self.layer.query_heads,
                kv_heads=self.layer.kv_heads,
                head_size=self.layer.head_size,
                scale=self.layer.scale,
                window=self.layer.window,
                softcap=self.layer.softcap,
            )
            out, lse = dense(q[None, start : start + n].double(), k, v, mixing, sinks)
            outs.append(out[0])
            sums.append(lse[0])
            start += n
        return torch.cat(outs), torch.cat(sums, 1)

    def check(self) -> None:
        found, (truth, _) = self.run(), self.truth()
        assert not found.isnan().any()
        assert error(found, truth) < TOLERANCE[self.dtype]
        start = 0
        for n, kv in self.rows:
            if kv == 0:
                assert not found[start : start + n].any()
            start += n


def dense(q: Tensor, k: Tensor, v: Tensor, mixing: Mixing, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[B, n, H, D], [B, m, K, D] -> [B, n, H, D], lse [B, H, n]; all scores at once."""
    n, m, group = q.shape[1], k.shape[1], mixing.query_heads // mixing.kv_heads
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(group, 2)) * mixing.scale
    if mixing.softcap is not None:
        scores = mixing.softcap * torch.tanh(scores / mixing.softcap)
    back = (m - n + torch.arange(n, device=q.device))[:, None] - torch.arange(m, device=q.device)
    if mixing.causal:
        scores = scores.masked_fill((back < 0) | (back >= (mixing.window or 1 << 40)), -math.inf)
    if sinks is not None and m:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1) if m else scores.new_full(scores.shape[:3], -math.inf)
    weights = (scores - lse[..., None]).exp()[..., :m].nan_to_num(0)
    return torch.einsum("bhnm,bmhd->bnhd", weights, v.repeat_interleave(group, 2)), lse


SMALL = [(1, 1), (40, 40), (3, 0), (17, 70), (1, 33), (33, 150)]
FACTS: list[dict[str, Any]] = [
    {},
    {"window": 20},
    {"window": 1},
    {"softcap": 2.0},
    {"sinks": True},
    {"window": 40, "softcap": 1.0, "sinks": True},
]


# Under the interpreter


@pytest.mark.supports("Attention", "FlashAttention-2, forward over pages and backward (part flash_attention_2)")
@compiled
@pytest.mark.long
def test_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 24, done.stdout


@interpreted
@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_interpreted_rules(facts: dict[str, Any]) -> None:
    Case(SMALL, layer(4, 2, 64, **facts), torch.float32).check()


@interpreted
@pytest.mark.parametrize(
    ("heads", "head_size"), [((1, 1), 64), ((3, 1), 72), ((7, 1), 80), ((6, 2), 96), ((16, 1), 128)]
)
def test_interpreted_heads(heads: tuple[int, int], head_size: int) -> None:
    Case([(5, 5), (18, 40), (2, 0)], layer(*heads, head_size), torch.float16, page_size=64).check()


@interpreted
def test_interpreted_wide_heads() -> None:
    Case([(5, 5), (18, 40)], layer(2, 1, 256), torch.float32).check()


@interpreted
@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_interpreted_pages_and_loose_bounds(page_size: int) -> None:
    Case(SMALL, layer(4, 2, 64), torch.float32, page_size=page_size, slack=90).check()


@interpreted
def test_interpreted_strided_queries_and_pools() -> None:
    case = Case(SMALL, layer(4, 2, 64), torch.float32)
    q, cache, rows, _ = case.build()
    wide = torch.cat([q, q + 1], -1)
    pool = {name: torch.stack([t, t + 1], 1).flatten(0, 1)[::2] for name, t in cache.tensors.items()}
    backend = case.backend()
    moved = LayerCache(layout=cache.layout, group=0, page_size=16, tensors=pool)
    out = backend.forward(wide[..., :64], None, None, moved, backend.plan(rows, case.layer, {}))
    assert torch.equal(out, case.run())


@interpreted
def test_interpreted_lse_and_what_sees_nothing() -> None:
    case = Case(SMALL, layer(4, 2, 64, softcap=3.0), torch.float32)
    q, cache, rows, _ = case.build()
    lse = torch.full((4, q.shape[0]), math.nan)
    plan = case.backend().plan(rows, case.layer, {})
    entries = Entries(cache.tensors["k"], cache.tensors["v"], table=rows.page_table)
    (only,) = plan.passes
    only.path.launch(Forward(q, entries, only.schedule, plan.mixing, only.path.tiling, torch.empty_like(q), lse=lse))
    truth = case.truth()[1]
    assert torch.equal(lse.isinf(), truth.isinf())
    torch.testing.assert_close(lse.double(), truth, atol=5e-6, rtol=0)


@interpreted
def test_interpreted_schedules() -> None:
    """The tiles are those of the definition, each once, the longest first."""
    chance = random.Random(0)
    for _ in range(25):
        tile, block, causal = chance.choice([8, 32, 128]), chance.choice([64, 128]), chance.random() < 0.8
        window = chance.choice([None, 1, 50, 1000]) if causal else None
        rows = [(n, chance.choice([n, n + chance.randint(0, 500), 0])) for n in chance.choices([0, 1, 3, 33, 300], k=5)]
        starts = [sum(n for n, _ in rows[:i]) for i in range(len(rows) + 1)]
        schedule = make_schedule(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([kv for _, kv in rows], dtype=torch.int32),
            tokens=starts[-1],
            max_query=max(1, *(n for n, _ in rows)),
            tile_tokens=tile,
            block=block,
            causal=causal,
            window=window,
        )
        expected = []
        for row, (n, kv) in enumerate(rows):
            for first in range(0, n, tile):
                position = kv - n + first
                end = max(1, -(-(min(position + tile, kv) if causal else kv) // block))
                begin = 0 if window is None else min(max(position - window + 1, 0) // block, end - 1)
                lowest = 0 if window is None else max(kv - n - window + 1, 0)
                length = min(tile, n - first)
                expected.append([row, starts[row] + first, length, position, kv, begin, end, lowest])
        count = int(schedule.count)
        found = schedule.tiles[:count].tolist()
        assert sorted(found) == sorted(expected)
        assert count <= schedule.limit
        if window is None:
            blocks = [tile[6] - tile[5] for tile in found]
            assert blocks == sorted(blocks, reverse=True)


GRADIENTS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 70, 70, 4, 2, 64), {}),
    ((1, 33, 150, 2, 1, 72), {"window": 20}),
    ((1, 40, 40, 2, 2, 64), {"softcap": 2.0}),
    ((1, 20, 90, 3, 1, 64), {"causal": False, "scale": 0.2}),
    ((1, 50, 20, 1, 1, 64), {}),  # queries that see nothing
]


def check_gradients(
    shape: tuple[int, ...], facts: dict[str, Any], dtype: torch.dtype, device: str, tolerance: float
) -> None:
    batch, n, m, heads, kv_heads, size = shape
    generator = torch.Generator(device).manual_seed(1)
    inputs = [
        torch.randn(batch, length, count, size, generator=generator, device=device).to(dtype).requires_grad_()
        for length, count in ((n, heads), (m, kv_heads), (m, kv_heads))
    ]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mixing = Mixing(heads, kv_heads, size, **{"scale": size**-0.5, **facts})
    truth, sums = dense(*exact, mixing)
    out, lse = flash_attention(*inputs, **facts)
    assert error(out, truth) < tolerance
    torch.testing.assert_close(
        lse.double(), sums.transpose(0, 1).flatten(1), atol=2e-2 if tolerance > 1e-3 else 1e-5, rtol=0
    )
    assert not lse.requires_grad
    dout = torch.randn(out.shape, generator=generator, device=device).to(dtype)
    seen = sums.isfinite().transpose(1, 2)[..., None]  # the definition has no gradient where nothing is seen
    wanted = torch.autograd.grad((truth * seen)[seen.expand_as(truth)], exact, dout.double()[seen.expand_as(truth)])
    for found, gradient in zip(torch.autograd.grad(out, inputs, dout), wanted, strict=True):
        assert error(found, gradient.nan_to_num(0)) < 2 * tolerance


@interpreted
@pytest.mark.parametrize(("shape", "facts"), GRADIENTS, ids=str)
def test_interpreted_gradients(shape: tuple[int, ...], facts: dict[str, Any]) -> None:
    check_gradients(shape, facts, torch.float32, "cpu", 2e-6)


def check_ragged_gradients(dtype: torch.dtype, device: str, tolerance: float) -> None:
    rows = [(30, 30), (0, 0), (12, 70), (1, 5)]
    generator = torch.Generator(device).manual_seed(1)
    inputs = [
        torch.randn(sum(row[side] for row in rows), 2, 64, generator=generator, device=device)
        .to(dtype)
        .requires_grad_()
        for side in (0, 1, 1)
    ]
    starts = [
        torch.tensor([sum(row[side] for row in rows[:i]) for i in range(5)], dtype=torch.int32, device=device)
        for side in (0, 1)
    ]
    out, _ = flash_attention(*inputs, query_start=starts[0], kv_start=starts[1], max_query=30)
    dout = torch.randn(out.shape, generator=generator, device=device).to(dtype)
    found = torch.autograd.grad(out, inputs, dout)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mixing = Mixing(2, 2, 64, 64**-0.5)
    truths = []
    for row in (0, 2, 3):
        parts = [x[None, int(s[row]) : int(s[row + 1])] for x, s in zip(exact, starts + starts[1:], strict=True)]
        truths.append(dense(*parts, mixing)[0][0])
    truth = torch.cat(truths)
    assert error(out, truth) < tolerance
    for one, gradient in zip(found, torch.autograd.grad(truth, exact, dout.double()), strict=True):
        assert error(one, gradient) < 2 * tolerance


@interpreted
def test_interpreted_ragged_gradients() -> None:
    check_ragged_gradients(torch.float32, "cpu", 2e-6)


@compiled
def test_layers_without_gradients() -> None:
    hopper = DeviceFacts(type="cuda", capability=(9, 0))
    assert FlashAttention2.differentiable(hopper, layer(4, 2, 64)) is not None
    assert FlashAttention2.differentiable(DeviceFacts(type="cpu"), layer(4, 2, 64)) is None
    assert FlashAttention2.differentiable(DeviceFacts(type="cuda", capability=(7, 5)), layer(4, 2, 64)) is None
    assert FlashAttention2.differentiable(hopper, layer(4, 2, 64, sinks=True)) is None
    assert FlashAttention2.differentiable(hopper, layer(4, 2, 20)) is None


# Without a device


def cuda_need(**changes: Any) -> AttentionNeed:
    need = AttentionNeed(
        device=DeviceFacts(type="cuda", capability=(9, 0)),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=16,
        layers=(layer(32, 8, 128),),
        phase="prefill",
        max_query=8192,
        max_rows=256,
        max_length=8192,
    )
    return msgspec.structs.replace(need, **changes)


@compiled
def test_refusals_name_what_is_wrong() -> None:
    assert FlashAttention2.refusals(cuda_need(batch_invariant=True), None) == []

    def refusal(options: FlashAttention2Options | None = None, **changes: Any) -> str:
        return " ".join(FlashAttention2.refusals(cuda_need(**changes), options))

    assert "not on cpu" in refusal(device=DeviceFacts(type="cpu"))
    assert "8.0 or later, not 7.5" in refusal(device=DeviceFacts(type="cuda", capability=(7, 5)))
    assert "not in float32" in refusal(dtype="float32", kv_dtype="float32")
    assert "not in float16" in refusal(kv_dtype="float16")
    assert refusal(kv_dtype="int8") == refusal(kv_dtype="float8_e4m3fn") == ""
    assert "at least 16 entries, not 8" in refusal(page_size=8)
    assert "not 48" in refusal(page_size=48)
    assert "serves prefill" in refusal(phase="decode")
    assert "ancestor" in refusal(ancestors=True)
    assert "score mass" in refusal(score_mass=True)
    assert "not 288" in refusal(layers=(layer(4, 4, 288),))
    assert "not 100" in refusal(layers=(layer(4, 4, 100),))
    assert "no multiple of 3" in refusal(layers=(layer(4, 3, 64),))
    assert "above 0" in refusal(layers=(msgspec.structs.replace(layer(4, 4, 64), scale=-1.0),))
    hopper = FlashAttention2Options(kernel="hopper")
    assert refusal(hopper) == ""
    assert "9.x" in refusal(hopper, device=DeviceFacts(type="cuda", capability=(8, 0)))
    assert "not 256" in refusal(hopper, layers=(layer(4, 4, 256),))


@compiled
def test_auto_chooses_it_on_cuda_only() -> None:
    registry = Registry.discover()

    def choose(facts: DeviceFacts, phase: str, dtype: str) -> str | None:
        need = cuda_need(device=facts, phase=phase, dtype=dtype, kv_dtype=dtype)
        choice = PartChoice(use="auto")
        return resolve(
            registry, "attention", choice, need, device_type=facts.type, objective="latency", allow=()
        ).winner

    hopper, ampere, cpu = (
        DeviceFacts(type="cuda", capability=(9, 0)),
        DeviceFacts(type="cuda", capability=(8, 0)),
        DeviceFacts(type="cpu"),
    )
    assert choose(hopper, "prefill", "bfloat16") == choose(ampere, "prefill", "float16") == "flash_attention_2"
    others = {
        choose(hopper, "decode", "bfloat16"),
        choose(cpu, "prefill", "float32"),
        choose(hopper, "prefill", "float32"),
    }
    assert not {"flash_attention_2", None} & others


@compiled
def test_the_hopper_kernel_is_kept_to_what_it_is_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hopper_refusals((9, 0), "bfloat16", 128) == []
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert "not 3.9.0" in hopper_refusals((9, 0), "bfloat16", 128)[0]
    assert choose_path("auto", (9, 0), "bfloat16", 128) == choose_path("portable", (9, 0), "bfloat16", 128)


@compiled
def test_flash_attention_names_what_is_wrong() -> None:
    x = torch.zeros(1, 4, 2, 64)
    with pytest.raises(PegboardError, match="CUDA"):
        flash_attention(x, x, x)
    with pytest.raises(PegboardError, match=r"must be \[batch"):
        flash_attention(x[0], x, x)
    with pytest.raises(PegboardError, match="does not go with"):
        flash_attention(x, x[..., :32], x[..., :32])


class Offline:
    """A driver that only says what to compile for. Each architecture has a device number of its own, since compiled
    kernels are kept by device."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return 1000 + self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@pytest.fixture
def offline() -> Iterator[Callable[[int], None]]:
    active = triton.runtime.driver._active
    yield lambda architecture: triton.runtime.driver.set_active(Offline(architecture))
    triton.runtime.driver.set_active(active)


@dataclass
class Assembly:
    """What `cuobjdump` says of a compiled kernel."""

    #: Bytes of stack, where registers spill.
    stack: int
    operations: list[str]
    #: Operations of innermost loops.
    loops: list[list[str]]


def disassemble(kernel: Any) -> Assembly:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)(.*?);", code, re.M)
    at = {int(address, 16): index for index, (address, _, _) in enumerate(lines)}
    operations = [operation for _, operation, _ in lines]
    spans = []
    for index, (_, operation, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", rest) if operation.startswith("BRA") else None
        if target and at.get(int(target[1], 16), index) < index:
            spans.append((at[int(target[1], 16)], index + 1))
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None
    return Assembly(int(stack[1]), operations, [operations[a:b] for a, b in inner])


def compile_forward(
    monkeypatch: pytest.MonkeyPatch, kernel: str, capability: tuple[int, int], mixing: Mixing, page_size: int
) -> Assembly:
    """The kernel as the launcher would run it, without a device."""
    from pegboard_attention.flash_attention_2 import hopper_launch, portable_launch

    module = hopper_launch if kernel == "hopper" else portable_launch
    made = []

    class Warmup:
        def __init__(self, function: Any) -> None:
            self._function = function

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: made.append(
                self._function.warmup(*arguments, grid=grid, **constants)
            )

    name = f"{kernel}_forward"
    monkeypatch.setattr(module, name, Warmup(getattr(module, name)))
    monkeypatch.setattr(hopper_launch, "_processors", lambda device: 132)

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q = meta(1024, mixing.query_heads, mixing.head_size)
    pool = meta(100, page_size, mixing.kv_heads, mixing.head_size)
    schedule = Schedule(meta(64, 8, dtype=torch.int32), meta(1, dtype=torch.int32))
    entries = Entries(pool, pool, table=meta(4, 64, dtype=torch.int32))
    path = choose_path(kernel, capability, "bfloat16", mixing.head_size)
    path.launch(Forward(q, entries, schedule, mixing, path.tiling, torch.empty_like(q)))
    return disassemble(made[0])


def hot(assembly: Assembly, operation: str) -> list[list[str]]:
    return [loop for loop in assembly.loops if any(op.startswith(operation) for op in loop)]


@compiled
@pytest.mark.parametrize(
    ("head_size", "page_size", "facts"), [(128, 16, {}), (64, 64, {"window": 100, "softcap": 5.0})], ids=str
)
def test_hopper_compiles_to_its_instructions(
    head_size: int,
    page_size: int,
    facts: dict[str, Any],
    offline: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offline(90)
    assembly = compile_forward(monkeypatch, "hopper", (9, 0), Mixing(32, 8, head_size, 0.1, **facts), page_size)
    for operation in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert any(op.startswith(operation) for op in assembly.operations), operation
    loops = hot(assembly, "HGMMA")
    assert len(loops) >= 4  # whole and masked blocks, of two warpgroups
    for loop in loops:
        assert not {"LDL", "STL"} & set(loop)
        # PV of the block before is waited for once the exponentials are done
        waits = [index for index, op in enumerate(loop) if op.startswith("WARPGROUP.DEPBAR")]
        assert len(waits) == 2
        assert sum(op.startswith("MUFU.EX2") for op in loop[waits[0] : waits[1]]) >= 64


@compiled
@pytest.mark.parametrize("head_size", [128, 256])
@pytest.mark.parametrize(("architecture", "product"), [(80, "HMMA"), (90, "HGMMA")])
def test_portable_compiles_for(
    architecture: int, product: str, head_size: int, offline: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(architecture)
    assembly = compile_forward(monkeypatch, "portable", divmod(architecture, 10), Mixing(32, 8, head_size, 0.1), 16)
    assert assembly.stack == 0
    loops = hot(assembly, product)
    assert loops
    assert all(
        any(op.startswith("LDGSTS.E.BYPASS.LTC128B.128") or op == "LDGSTS.E.BYPASS.128" for op in loop)
        for loop in loops
    )


@compiled
def test_backward_compiles_for_ampere(offline: Callable[[int], None]) -> None:
    from pegboard_attention.flash_attention_2.backward import kv_gradients, query_gradients

    offline(80)
    x, sums, starts = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((64, 8, 128), torch.bfloat16), ((8, 64), torch.float32), ((3,), torch.int32))
    )
    numbers = (64, 8, 2, 0.1, 0.0, 0.1, 1 << 30)
    constants = {"WIDTH": 128, "HEAD_SIZE": 128, "CAUSAL": True, "SOFTCAP": False}
    kinds = ((kv_gradients, (x, x)), (query_gradients, (x,)))
    for tiling, (function, results) in zip(backward_tilings(128), kinds, strict=True):
        arguments = (x, x, x, x, sums, sums, *results, starts, starts, *numbers)
        sizes = {"M": tiling.rows, "N": tiling.block, "num_warps": tiling.warps, "num_stages": tiling.stages}
        kernel = function.warmup(*arguments, **constants, **sizes, grid=(1,))
        assembly = disassemble(kernel)
        assert assembly.stack == 0
        assert hot(assembly, "HMMA")


# On a GPU

RAGGED = [(1, 1), (300, 300), (7, 0), (129, 700), (64, 64), (33, 1000), (128, 128), (257, 513), (1, 129)]


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("page_size", [16, 64, 128, 256])
    def test_pages(self, page_size: int, kernel: str) -> None:
        Case(RAGGED, layer(32, 8, 128), torch.bfloat16, page_size, kernel).check()

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("heads", [(4, 4), (14, 2), (12, 1), (64, 1), (6, 2)], ids=str)
    def test_heads(self, heads: tuple[int, int], kernel: str) -> None:
        Case(RAGGED, layer(*heads, 128), torch.float16, 16, kernel, slack=300).check()

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("head_size", [64, 72, 80, 96])
    def test_head_sizes(self, head_size: int, kernel: str) -> None:
        Case(RAGGED, layer(8, 2, head_size), torch.bfloat16, 64, kernel).check()

    @pytest.mark.parametrize("head_size", [160, 256])
    def test_wide_heads(self, head_size: int) -> None:
        Case(RAGGED, layer(8, 2, head_size), torch.bfloat16, 64).check()

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("facts", [*FACTS, {"window": 300}], ids=str)
    def test_rules(self, facts: dict[str, Any], kernel: str) -> None:
        Case(RAGGED, layer(16, 4, 128, **facts), torch.bfloat16, 16, kernel).check()

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_neighbours_do_not_matter(self, kernel: str) -> None:
        case = Case(RAGGED, layer(8, 2, 128), torch.bfloat16, 64, kernel)
        q, cache, rows, _ = case.build()
        together, backend, start = case.run(), case.backend(), 0
        for row, (n, kv) in enumerate(RAGGED):
            alone = Rows(
                query_start=torch.tensor([0, n], dtype=torch.int32, device="cuda"),
                kv_len=rows.kv_len[row : row + 1],
                page_table=rows.page_table[row : row + 1],
                row_slot=rows.row_slot[row : row + 1],
                ancestors=None,
                bounds=Bounds(rows=1, tokens=n, max_query=n, min_query=n, max_kv=kv),
            )
            plan = backend.plan(alone, case.layer, {})
            out = backend.forward(q[start : start + n], None, None, cache, plan)
            assert torch.equal(out, together[start : start + n])
            start += n

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_lse(self, kernel: str) -> None:
        case = Case(RAGGED, layer(8, 2, 128, sinks=True), torch.bfloat16, 64, kernel)
        q, cache, rows, sinks = case.build()
        lse = torch.full((8, q.shape[0]), math.nan, device="cuda")
        plan = case.backend().plan(rows, case.layer, {})
        entries = Entries(cache.tensors["k"], cache.tensors["v"], table=rows.page_table)
        out = torch.empty_like(q)
        (only,) = plan.passes
        tiling = only.path.tiling
        only.path.launch(Forward(q, entries, only.schedule, plan.mixing, tiling, out, lse=lse, sinks=sinks))
        truth = case.truth()[1]
        assert torch.equal(lse.isinf(), truth.isinf())
        torch.testing.assert_close(lse.double(), truth, atol=1e-4, rtol=0)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_entries_past_two_to_the_31(self, kernel: str) -> None:
        case = Case([(100, 300)], layer(8, 2, 128), torch.bfloat16, 16, kernel)
        q, cache, rows, _ = case.build()
        pages = (1 << 31) // (16 * 2 * 128) + 4096
        far = torch.arange(pages - cache.tensors["k"].shape[0], pages, device="cuda")
        pool = {name: torch.empty(pages, 16, 2, 128, dtype=torch.bfloat16, device="cuda") for name in "kv"}
        for name, tensor in pool.items():
            tensor[far] = cache.tensors[name]
        table = (rows.page_table + int(far[0])).int()
        moved = LayerCache(layout=cache.layout, group=0, page_size=16, tensors=pool)
        backend = case.backend()
        plan = backend.plan(msgspec.structs.replace(rows, page_table=table), case.layer, {})
        assert torch.equal(backend.forward(q, None, None, moved, plan), case.run())

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_captured_with_lengths_from_the_device(self, kernel: str) -> None:
        case = Case([(64, 200), (64, 64), (64, 100)], layer(8, 2, 128), torch.bfloat16, 16, kernel)
        q, cache, rows, _ = case.build()
        backend = case.backend()
        backend.forward(q, None, None, cache, backend.plan(rows, case.layer, {}))  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.forward(q, None, None, cache, backend.plan(rows, case.layer, {}))
        rows.kv_len[1] = 0
        graph.replay()
        truth = case.truth()[0]
        truth[64:128] = 0
        assert error(out, truth) < TOLERANCE[torch.bfloat16]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
    @pytest.mark.parametrize(
        ("shape", "facts"),
        [*GRADIENTS, ((2, 300, 300, 8, 2, 128), {}), ((1, 130, 130, 4, 2, 256), {})],
        ids=str,
    )
    def test_gradients(self, shape: tuple[int, ...], facts: dict[str, Any], dtype: torch.dtype) -> None:
        check_gradients(shape, facts, dtype, "cuda", 1e-2 if dtype == torch.bfloat16 else 2e-3)

    def test_ragged_gradients(self) -> None:
        check_ragged_gradients(torch.bfloat16, "cuda", 1e-2)
