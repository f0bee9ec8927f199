"""TorchAttention against a naive float64 loop over rows, queries, heads and entries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionLayer, AttentionNeed, LayerCache
from pegboard.contracts.batch import Bounds, Rows
from pegboard.contracts.device import DeviceFacts
from pegboard.dtypes import dtype_name
from pegboard.errors import PegboardError
from pegboard_attention import tiles
from pegboard_attention.torch_backend import TorchAttention

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = ["cpu", CUDA]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """One step: rows of (queries, kv_len), with every entry and page that nobody may read poisoned."""

    rows: list[tuple[int, int]]
    layer: AttentionLayer
    dtype: torch.dtype = torch.float64
    page_size: int = 16
    #: Per token, bit masks over the row's own queries.
    ancestors: list[int] | None = None
    #: Added to the true greatest kv_len: the host's bound may be loose.
    slack: int = 0
    #: Rows 0 and 1 share their first pages.
    shared_pages: int = 0
    device: str = "cpu"
    seed: int = 0

    def need(self) -> AttentionNeed:
        return AttentionNeed(
            device=DeviceFacts(type=self.device),
            dtype=dtype_name(self.dtype),
            kv_dtype=dtype_name(self.dtype),
            page_size=self.page_size,
            layers=(self.layer,),
            phase="decode",
            max_query=63,
            max_rows=64,
            max_length=4096,
            ancestors=self.ancestors is not None,
        )

    def lowest(self, row: int) -> int:
        """The first entry that any query of the row may see."""
        n, kv = self.rows[row]
        return 0 if self.layer.window is None else max(0, kv - n - self.layer.window + 1)

    def build(self) -> tuple[Tensor, Tensor, Tensor, LayerCache, Rows, Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)
        layer, size = self.layer, self.page_size
        width = max(max(-(-kv // size) for _, kv in self.rows) + 2, 1)
        pages = len(self.rows) * width + 1
        shape = (pages, size, layer.kv_heads, layer.head_size)
        stored = [torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2)]
        table = (torch.randperm(pages - 1, generator=generator) + 1).view(len(self.rows), width)
        if self.shared_pages:
            table[1, : self.shared_pages] = table[0, : self.shared_pages]
        for row, (_, kv) in enumerate(self.rows):
            lowest = self.lowest(row)
            table[row, : lowest // size] = 0  # dropped from the window
            for entry in range(lowest, kv):
                for tensor in stored:
                    tensor[table[row, entry // size], entry % size] = torch.randn(
                        layer.kv_heads, layer.head_size, generator=generator, dtype=torch.float64
                    )
        starts = [0]
        for n, _ in self.rows:
            starts.append(starts[-1] + n)
        tokens, lengths = starts[-1], [n for n, _ in self.rows]
        q = torch.randn(tokens, layer.query_heads, layer.head_size, generator=generator, dtype=torch.float64)
        own = [torch.full((tokens, *shape[2:]), torch.nan, dtype=self.dtype) for _ in range(2)]
        for row, (n, kv) in enumerate(self.rows):
            for i in range(n if kv else 0):
                for tensor, source in zip(own, stored, strict=True):
                    entry = kv - n + i
                    tensor[starts[row] + i] = source[table[row, entry // size], entry % size]
        layout = TorchAttention.layouts(self.need(), layer, None)[0]
        cache = LayerCache(
            layout=layout,
            group=0,
            page_size=size,
            tensors={"k": stored[0].to(self.device), "v": stored[1].to(self.device)},
        )
        rows = Rows(
            query_start=torch.tensor(starts, dtype=torch.int32, device=self.device),
            kv_len=torch.tensor([kv for _, kv in self.rows], dtype=torch.int32, device=self.device),
            page_table=table.to(torch.int32).to(self.device),
            row_slot=torch.arange(len(self.rows), device=self.device),
            ancestors=None if self.ancestors is None else torch.tensor(self.ancestors, device=self.device),
            bounds=Bounds(
                rows=len(self.rows),
                tokens=tokens,
                max_query=max(lengths),
                min_query=min(lengths),
                max_kv=max(kv for _, kv in self.rows) + self.slack,
            ),
        )
        sinks = torch.randn(layer.query_heads, generator=generator).to(self.device) if layer.sinks else None
        return q.to(self.dtype).to(self.device), own[0].to(self.device), own[1].to(self.device), cache, rows, sinks

    def visible(self, row: int, query: int) -> list[int]:
        """The definition, entry by entry."""
        n, kv = self.rows[row]
        if kv == 0:
            return []
        window = self.layer.window or 1 << 60
        if self.ancestors is None:
            here = kv - n + query
            return [e for e in range(kv) if here - window < e <= here]
        base = sum(m for m, _ in self.rows[:row])
        bits = self.ancestors[base : base + n]
        here = kv - n + bits[query].bit_count() - 1
        prefix = [e for e in range(kv - n) if e > here - window]
        own = [j for j in range(n) if bits[query] >> j & 1 and kv - n + bits[j].bit_count() - 1 > here - window]
        return prefix + [kv - n + j for j in own]

    def expected(self) -> Tensor:
        q, _, _, cache, rows, sinks = self.build()
        q, table = q.double().cpu(), rows.page_table.cpu().long()
        keys, values = (cache.tensors[name].cpu().double() for name in ("k", "v"))
        out = torch.zeros_like(q)
        layer, size, token = self.layer, self.page_size, 0
        for row, (n, _) in enumerate(self.rows):
            for i in range(n):
                entries = self.visible(row, i)
                for head in range(layer.query_heads if entries else 0):
                    shared = head // (layer.query_heads // layer.kv_heads)
                    k, v = (
                        torch.stack([x[table[row, e // size], e % size, shared] for e in entries])
                        for x in (keys, values)
                    )
                    scores = (k @ q[token, head]) * layer.scale
                    if layer.softcap is not None:
                        scores = layer.softcap * torch.tanh(scores / layer.softcap)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head].cpu().double()[None]])
                    weights = (scores - scores.max()).exp()
                    weights = (weights / weights.sum())[: len(entries)]
                    out[token, head] = weights @ v
                token += 1
        return out

    def run(self, *, keep: bool = True) -> Tensor:
        q, k, v, cache, rows, sinks = self.build()
        backend = TorchAttention.create(self.need(), None)
        with torch.inference_mode():
            plan = backend.plan(rows, self.layer, {})
            out = backend.forward(q, k if keep else None, v if keep else None, cache, plan, sinks)
            again = backend.forward(q, k if keep else None, v if keep else None, cache, plan, sinks)
        assert out.is_contiguous()
        assert torch.equal(out, again)  # the plan serves every layer
        return out.cpu()

    def check(self) -> None:
        expected, tolerance = self.expected(), TOLERANCE[self.dtype]
        for keep in (True, False):
            torch.testing.assert_close(self.run(keep=keep).double(), expected, atol=tolerance, rtol=tolerance)


def layer(h: int = 6, k: int = 2, d: int = 64, **facts: object) -> AttentionLayer:
    return AttentionLayer(query_heads=h, kv_heads=k, head_size=d, scale=1 / math.sqrt(d), **facts)  # type: ignore[arg-type]


RAGGED = [(1, 1), (1, 40), (7, 0), (9, 9), (1, 17), (4, 33), (2, 2), (17, 20)]
DECODE = [(1, 5), (1, 0), (1, 33), (1, 1), (1, 16), (1, 17)]
VERIFY = [(4, 4), (4, 30), (4, 0), (4, 17)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [RAGGED, DECODE, VERIFY], ids=["ragged", "decode", "verify"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
def test_matches_definition_in_every_dtype(rows: list[tuple[int, int]], dtype: torch.dtype, device: str) -> None:
    Case(rows, layer(), dtype, device=device).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 3, 5, 7, 16])
def test_head_sizes_and_group_ratios(head_size: int, ratio: int, device: str) -> None:
    rows = [(1, 18), (3, 5), (1, 0)]
    Case(rows, layer(2 * ratio, 2, head_size), torch.float32, device=device).check()
    Case([(1, 18), (1, 3)], layer(ratio, 1, head_size), page_size=64, device=device).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [RAGGED, DECODE, VERIFY], ids=["ragged", "decode", "verify"])
@pytest.mark.parametrize(
    "facts",
    [
        {"window": 4},
        {"window": 1},
        {"window": 16},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 5, "softcap": 1.0, "sinks": True},
    ],
    ids=str,
)
def test_windows_soft_caps_and_sinks(rows: list[tuple[int, int]], facts: dict[str, object], device: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        Case(rows, layer(**facts), dtype, device=device).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("facts", [{}, {"window": 3}, {"window": 2}, {"softcap": 2.0, "sinks": True}], ids=str)
def test_ancestor_masks(facts: dict[str, object], device: str) -> None:
    # 0 -> 1, 2; 1 -> 3; 2 -> 4: token 4 sees 0, 2 and itself
    tree = [0b1, 0b11, 0b101, 0b1011, 0b10101]
    chain = [0b1, 0b11, 0b111]
    Case([(5, 5), (5, 21), (5, 0)], layer(**facts), ancestors=tree * 3, device=device).check()
    Case([(5, 18), (1, 9), (3, 3)], layer(**facts), ancestors=[*tree, 1, *chain], device=device).check()


def test_a_chain_of_ancestors_is_the_causal_mask() -> None:
    for window in (None, 3):
        plain = Case([(4, 20), (2, 2)], layer(window=window))
        chain = replace(plain, ancestors=[0b1, 0b11, 0b111, 0b1111, 0b1, 0b11])
        torch.testing.assert_close(chain.run(), plain.run(), atol=1e-13, rtol=0)


def test_the_sixty_third_query_of_a_tree() -> None:
    ancestors = [(1 << (i + 1)) - 1 for i in range(63)]
    Case([(63, 70)], layer(2, 1), ancestors=ancestors).check()


@pytest.mark.parametrize("page_size", [16, 64])
def test_shared_pages_and_loose_bounds(page_size: int) -> None:
    rows = [(1, 3 * page_size), (3, 2 * page_size + 5), (1, 7)]
    Case(rows, layer(), page_size=page_size, shared_pages=1, slack=37).check()
    Case([(1, 3 * page_size), (1, 2 * page_size + 5)], layer(), page_size=page_size, shared_pages=2, slack=1).check()


@pytest.mark.parametrize("facts", [{}, {"window": 512}, {"window": 6}, {"softcap": 2.0}], ids=str)
def test_whole_prompts(facts: dict[str, object]) -> None:
    """Bounds say that nothing is cached: the given k and v are used where torch's causal mask is enough."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        Case([(40, 40)], layer(**facts), dtype).check()
    Case([(9, 9), (9, 0), (9, 9)], layer(**facts)).check()
    Case([(9, 0)], layer(**facts)).check()


def test_whole_prompts_do_not_read_the_cache() -> None:
    case = Case([(9, 9), (9, 9)], layer())
    q, k, v, cache, rows, _ = case.build()
    for tensor in cache.tensors.values():
        tensor.fill_(torch.nan)
    backend = TorchAttention.create(case.need(), None)
    out = backend.forward(q, k, v, cache, backend.plan(rows, case.layer, {}))
    torch.testing.assert_close(out, case.expected(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("facts", [{}, {"window": 5}, {"softcap": 2.0}], ids=str)
def test_blocks_of_rows_and_queries(facts: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so small that every loop runs; masks are kept or not."""
    monkeypatch.setattr(tiles, "GATHER_ELEMENTS", 2 * 64 * 45)
    monkeypatch.setattr(tiles, "SCORE_ELEMENTS", 6 * 40 * 3)
    Case(RAGGED, layer(**facts)).check()
    Case(VERIFY, layer(**facts)).check()
    Case(VERIFY, layer(**facts), ancestors=[0b1, 0b11, 0b101, 0b1011] * 4).check()
    monkeypatch.setattr(tiles, "KEPT_MASK_ELEMENTS", 0)
    Case(RAGGED, layer(**facts)).check()


@pytest.mark.parametrize("facts", [{}, {"window": 5}, {"softcap": 2.0, "sinks": True}], ids=str)
def test_neighbours_do_not_matter(facts: dict[str, object]) -> None:
    """Each row alone gives what it gives among others, though its padding differs."""
    case = Case(RAGGED, layer(**facts))
    q, _, _, cache, rows, sinks = case.build()
    together = case.run()
    backend = TorchAttention.create(case.need(), None)
    for row, (n, kv) in enumerate(RAGGED):
        start = int(rows.query_start[row])
        alone = Rows(
            query_start=torch.tensor([0, n], dtype=torch.int32),
            kv_len=rows.kv_len[row : row + 1],
            page_table=rows.page_table[row : row + 1],
            row_slot=rows.row_slot[row : row + 1],
            ancestors=None,
            bounds=Bounds(rows=1, tokens=n, max_query=n, min_query=n, max_kv=kv),
        )
        out = backend.forward(q[start : start + n], None, None, cache, backend.plan(alone, case.layer, {}), sinks)
        torch.testing.assert_close(out, together[start : start + n], atol=1e-14, rtol=1e-13)


def test_inputs_are_not_changed_and_strided_queries_are_read() -> None:
    case = Case(RAGGED, layer())
    q, k, v, cache, rows, _ = case.build()
    wide = torch.cat([q, q + 1], dim=-1)
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    backend = TorchAttention.create(case.need(), None)
    out = backend.forward(wide[..., :64], k, v, cache, backend.plan(rows, case.layer, {}))
    torch.testing.assert_close(out, case.expected(), atol=1e-12, rtol=1e-12)
    assert torch.equal(wide[..., :64], q)
    for name, tensor in cache.tensors.items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0))


def test_refusals_name_what_is_wrong() -> None:
    good = Case(DECODE, layer()).need()
    assert not TorchAttention.refusals(good, None)

    def refusal(**changes: object) -> str:
        import msgspec

        return " ".join(TorchAttention.refusals(msgspec.structs.replace(good, **changes), None))

    assert "int8" in refusal(kv_dtype="int8")
    assert "float16" in refusal(dtype="float32", kv_dtype="float16")
    assert "int32" in refusal(dtype="int32", kv_dtype="int32")
    assert "score mass" in refusal(score_mass=True)
    assert "neighbours" in refusal(batch_invariant=True)
    assert "63" in refusal(ancestors=True, max_query=64)
    assert "5 query heads" in refusal(layers=(layer(5, 2),))


def test_wrong_queries_are_named() -> None:
    case = Case(DECODE, layer())
    q, k, v, cache, rows, _ = case.build()
    backend = TorchAttention.create(case.need(), None)
    plan = backend.plan(rows, case.layer, {})
    with pytest.raises(PegboardError, match=r"\(5, 6, 64\)"):
        backend.forward(q[:5], k, v, cache, plan)
    with pytest.raises(PegboardError, match="float32"):
        backend.forward(q.float(), k, v, cache, plan)
    with pytest.raises(PegboardError, match="sinks"):
        backend.forward(q, k, v, cache, plan, torch.zeros(6))


@pytest.mark.parametrize("seed", range(30))
def test_query_groups_cover_every_row(seed: int) -> None:
    """The padded length of each group reaches the true length of the rows of those ranks, and waste stays bounded."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 60, (1,), generator=generator))
    lengths = (torch.rand(count, generator=generator) ** 4 * 300).long() + 1
    ranked = sorted(lengths.tolist(), reverse=True)
    bounds = Bounds(rows=count, tokens=sum(ranked), max_query=ranked[0], min_query=ranked[-1], max_kv=1000)
    groups = tiles.query_groups(bounds)
    assert [start for start, _, _ in groups] == [0, *(stop for _, stop, _ in groups[:-1])]
    assert groups[-1][1] == count
    for start, stop, slots in groups:
        assert all(length <= slots for length in ranked[start:stop])
    assert len(groups) <= math.log2(count) + 2
    assert sum((stop - start) * slots for start, stop, slots in groups) <= sum(ranked) * (2 * len(groups))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("rows", [RAGGED, DECODE, [(9, 9)]], ids=["ragged", "decode", "fresh"])
def test_nothing_synchronises(rows: list[tuple[int, int]], device: str) -> None:
    for facts in ({}, {"window": 5}, {"softcap": 2.0, "sinks": True}):
        case = Case(rows, layer(**facts), torch.bfloat16, device=device)
        q, k, v, cache, batch, sinks = case.build()
        backend = TorchAttention.create(case.need(), None)
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.forward(q, k, v, cache, backend.plan(batch, case.layer, {}), sinks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
