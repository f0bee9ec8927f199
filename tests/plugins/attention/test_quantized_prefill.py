"""FlashAttention2 over eight-bit caches: which kernels run, what they compile to, and their results on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from pegboard.contracts.attention import AttentionLayer, AttentionNeed  # noqa: E402
from pegboard.contracts.batch import Bounds, Rows  # noqa: E402
from pegboard.contracts.device import DeviceFacts  # noqa: E402
from pegboard.dtypes import torch_dtype  # noqa: E402
from pegboard.testing.oracles import paged  # noqa: E402
from pegboard_attention.flash_attention_2 import hopper_launch, unpacking  # noqa: E402
from pegboard_attention.flash_attention_2.backend import FlashAttention2  # noqa: E402
from pegboard_attention.flash_attention_2.options import FlashAttention2Options  # noqa: E402
from pegboard_attention.flash_attention_2.problem import Mixing  # noqa: E402
from pegboard_attention.flash_attention_2.schedule import Part  # noqa: E402
from pegboard_attention.flash_attention_2.unpacking import MOST_ENTRIES, make_rooms, workspace_entries  # noqa: E402
from pegboard_attention.quantized_kv import STORED  # noqa: E402

HEADS, KV_HEADS = 16, 4
FORMS = sorted(STORED)


def make_need(capability: tuple[int, int], kv: str, page: int = 64, size: int = 128, **changes: Any) -> AttentionNeed:
    window = changes.pop("window", None)
    layer = AttentionLayer(query_heads=HEADS, kv_heads=KV_HEADS, head_size=size, scale=size**-0.5, window=window)
    facts: dict[str, Any] = {
        "device": DeviceFacts(type="cuda", capability=capability),
        "dtype": "bfloat16",
        "kv_dtype": kv,
        "page_size": page,
        "layers": (layer,),
        "phase": "prefill",
        "max_query": 4096,
        "max_rows": 8,
        "max_length": 4096,
    }
    return AttentionNeed(**(facts | changes))


class Step:
    """Rows of (queries, kv_len) over random pages; the backend's workspace is full of NaN."""

    def __init__(
        self, need: AttentionNeed, rows: list[tuple[int, int]], device: str, bounds: Bounds | None = None
    ) -> None:
        self.need, self.layer, self.lengths, page = need, need.layers[0], rows, need.page_size
        assert FlashAttention2.refusals(need, None) == []
        self.backend = FlashAttention2.create(need, None)
        width = -(-max(kv for _, kv in rows) // page)
        table = (torch.randperm(len(rows) * width, generator=torch.Generator().manual_seed(0)) + 1).view(-1, width)
        starts = torch.tensor([sum(n for n, _ in rows[:i]) for i in range(len(rows) + 1)], dtype=torch.int32)
        self.rows = Rows(
            query_start=starts.to(device),
            kv_len=torch.tensor([kv for _, kv in rows], dtype=torch.int32, device=device),
            page_table=table.int().to(device),
            row_slot=torch.arange(len(rows), device=device),
            ancestors=None,
            bounds=bounds
            or Bounds(
                rows=len(rows),
                tokens=int(starts[-1]),
                max_query=max(n for n, _ in rows),
                min_query=min(n for n, _ in rows),
                max_kv=max(kv for _, kv in rows),
            ),
        )
        layout = FlashAttention2.layouts(need, self.layer, None)[0]
        self.cache = paged.allocate(layout, len(rows) * width + 1, page, device)
        self.workspace = {
            spec.name: torch.full(spec.shape, torch.nan, dtype=torch_dtype(spec.dtype), device=device)
            for spec in self.backend.workspace()
        }
        generator = torch.Generator().manual_seed(1)
        q = torch.randn(self.rows.bounds.tokens, HEADS, self.layer.head_size, generator=generator)
        self.q = q.to(device, torch_dtype(need.dtype))

    def fill(self) -> None:
        """Random entries, and NaN or the largest number in those that no row has."""
        paged.fill_entries(self.cache, 3)
        paged.poison_entries(self.cache, torch.cat([self.entries(row) for row in range(len(self.lengths))]))

    def entries(self, row: int) -> torch.Tensor:
        entry, page = torch.arange(self.lengths[row][1]), self.need.page_size
        return self.rows.page_table[row].cpu().long()[entry // page] * page + entry % page

    def run(self) -> torch.Tensor:
        plan = self.backend.plan(self.rows, self.layer, self.workspace)
        return self.backend.forward(self.q, None, None, self.cache, plan)

    def truth(self) -> torch.Tensor:
        """By the definition, in float64 on the CPU."""
        outs, start = [], 0
        for row, (n, kv) in enumerate(self.lengths):
            k, v = (
                x.repeat_interleave(HEADS // KV_HEADS, 1) for x in paged.read_entries(self.cache, self.entries(row))
            )
            q = self.q[start : start + n].cpu().double()
            back = (kv - n + torch.arange(n))[:, None] - torch.arange(kv)
            hidden = (back < 0) | (back >= (self.layer.window or kv + 1))
            scores = torch.einsum("nhd,mhd->hnm", q, k) * self.layer.scale
            outs.append(torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
            start += n
        return torch.cat(outs)


def kernels(
    compile_for: Callable[..., Any],
    capability: int,
    rows: list[tuple[int, int]],
    kv: str,
    bounds: Bounds | None = None,
    **facts: Any,
) -> list[Any]:
    with compile_for(capability) as made:
        Step(make_need(divmod(capability, 10), kv, **facts), rows, "cpu", bounds).run()
    return list(made)


@pytest.mark.parametrize("kv", FORMS)
def test_long_prompts_are_unpacked_for_the_hopper_kernel(
    compile_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    monkeypatch.setattr(hopper_launch, "_processors", lambda device: 132)
    made = kernels(compile_for, 90, [(512, 2048), (100, 100)], kv)
    assert [found.kernel for found in made] == ["_schedule", "unpack", "hopper_forward"]
    assert made[1].stack == 0


@pytest.mark.parametrize(
    ("capability", "kv", "rows", "facts"),
    [
        (90, "int8", [(20, 200)] * 15, {"max_rows": 16}),  # too few queries for it to pay
        (90, "float8_e4m3fn", [(512, 2048)], {"batch_invariant": True}),
        (80, "int8", [(512, 2048)], {"page": 16}),
        pytest.param(80, "float8_e4m3fn", [(512, 2048)], {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_portable_kernel_reads_bytes(
    compile_for: Callable[..., Any], capability: int, kv: str, rows: list[tuple[int, int]], facts: dict[str, Any]
) -> None:
    made = kernels(compile_for, capability, rows, kv, **facts)
    assert [found.kernel for found in made] == ["_schedule", "portable_forward"]
    assert made[1].stack == 0
    assert made[1].instructions["HGMMA" if capability == 90 else "HMMA"] > 0


UNPACKING = ["unpack", "hopper_forward"]


@pytest.mark.parametrize("kv", FORMS)
def test_rows_take_turns_in_the_workspace(
    compile_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    monkeypatch.setattr(hopper_launch, "_processors", lambda device: 132)
    made = kernels(compile_for, 90, [(300, 4096), (300, 4000)], kv, max_rows=1)
    assert [found.kernel for found in made] == ["_schedule"] * 2 + UNPACKING * 2


def test_a_padded_step_is_unpacked(compile_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows in a bucket of 16, whose bounds are twice what the workspace holds."""
    monkeypatch.setattr(hopper_launch, "_processors", lambda device: 132)
    rows = [(100, 300)] * 5 + [(0, 0)] * 11
    padded = Bounds(rows=16, tokens=512, max_query=512, min_query=0, max_kv=8192)
    made = kernels(compile_for, 90, rows, "int8", padded, max_rows=256, max_length=32768)
    assert [found.kernel for found in made] == ["_schedule"] * 2 + UNPACKING * 2


def test_only_rows_that_exceed_the_workspace_are_read_as_bytes(
    compile_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_launch, "_processors", lambda device: 132)
    padded = Bounds(rows=1, tokens=512, max_query=512, min_query=0, max_kv=2 * MOST_ENTRIES)
    made = kernels(compile_for, 90, [(512, 40000)], "int8", padded, max_length=1 << 20)
    assert [found.kernel for found in made] == ["_schedule"] * 2 + [*UNPACKING, "portable_forward"]


def test_every_row_is_in_one_part() -> None:
    """By its place, or by its length; what is in the workspace at once fits."""
    generator = torch.Generator().manual_seed(2)
    entries = workspace_entries(32, 1 << 18, 64)
    flat = torch.empty(entries * KV_HEADS * 128, device="meta")
    for _ in range(50):
        count, longest = (int(torch.randint(1, high, (1,), generator=generator)) for high in (33, 1 << 18))
        rows = Rows(
            query_start=flat[: count + 1],
            kv_len=flat[:count],
            page_table=flat[:count, None],
            row_slot=flat[:count],
            ancestors=None,
            bounds=Bounds(rows=count, tokens=64 * count, max_query=64, min_query=0, max_kv=longest),
        )
        rooms = make_rooms(rows, Mixing(HEADS, KV_HEADS, 128, 0.1), 64, flat, flat)
        assert all((room.part.end_row - room.part.first_row) * room.stride <= entries for room in rooms)
        parts = [room.part for room in rooms]
        if longest > rooms[0].stride:
            parts.append(Part(0, count, above=rooms[0].stride))
        for row, length in enumerate(torch.randint(0, longest + 1, (count,), generator=generator).tolist()):
            taken = [p for p in parts if p.first_row <= row < p.end_row and p.above < length <= p.most]
            assert len(taken) == 1


def test_the_workspace_has_a_bound() -> None:
    need = make_need((9, 0), "int8", max_length=1 << 20)
    specs = FlashAttention2.create(need, None).workspace()
    assert [spec.shape for spec in specs] == [(MOST_ENTRIES * KV_HEADS * 128,)] * 2
    for other in ({"kv": "bfloat16"}, {"kv": "int8", "batch_invariant": True}, {"kv": "int8", "size": 256}):
        assert FlashAttention2.create(make_need((9, 0), **other), None).workspace() == ()


def test_the_hopper_kernel_alone_is_refused() -> None:
    options = FlashAttention2Options(kernel="hopper")
    assert "they are unpacked for it" in FlashAttention2.refusals(make_need((9, 0), "int8"), options)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kv", FORMS)
class TestOnGpu:
    @pytest.mark.parametrize("page", [16, 64, 256])
    @pytest.mark.parametrize("rows", [[(300, 300), (129, 700), (65, 65)], [(257, 1025)], [(20, 200)] * 15], ids=str)
    def test_against_the_definition(self, kv: str, page: int, rows: list[tuple[int, int]]) -> None:
        for facts in ({}, {"window": 100}, {"size": 64}, {"batch_invariant": True}):
            step = Step(make_need(torch.cuda.get_device_capability(), kv, page, **facts), rows, "cuda")
            step.fill()
            found, truth = step.run().cpu().double(), step.truth()
            assert (found - truth).norm() / truth.norm() < 8e-3, facts

    @pytest.mark.parametrize("entries", [256, 512, 1024])
    def test_in_turns(self, monkeypatch: pytest.MonkeyPatch, kv: str, entries: int) -> None:
        """A row or two at once, and rows that are longer than the workspace."""
        monkeypatch.setattr(unpacking, "MOST_ENTRIES", entries)
        rows = [(300, 300), (129, 700), (65, 65), (40, 512), (33, 256), (1, 1)]
        for facts in ({}, {"window": 100}):
            step = Step(make_need(torch.cuda.get_device_capability(), kv, **facts), rows, "cuda")
            step.fill()
            found, truth = step.run().cpu().double(), step.truth()
            assert (found - truth).norm() / truth.norm() < 8e-3, facts

    def test_replayed_with_shorter_rows(self, kv: str) -> None:
        step = Step(make_need(torch.cuda.get_device_capability(), kv), [(200, 300), (70, 90)], "cuda")
        step.fill()
        step.run()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step.run()
        step.lengths = [(200, 250), (70, 71)]
        step.rows.kv_len.copy_(torch.tensor([250, 71]))
        graph.replay()
        truth = step.truth()
        assert (out.cpu().double() - truth).norm() / truth.norm() < 8e-3
