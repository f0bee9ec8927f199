"""Decode attention over paged K/V: FlashDecoding beside torch, 32 query and 8 KV heads of 128, shuffled pages.

    python benchmarks/attention_decode.py --page 64 --page 16

Columns: microseconds a layer (the step's schedule, which all layers share, stands apart), the share of the
streaming-read ceiling that its K/V bytes reach, and `error` against float64. SDPA reads dense K/V, without pages.
`fa3` is FlashAttention-3 with pages of 16 as recorded on the same kind of device; it isn't run here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import READ_CEILING, copies_for, microseconds, print_table, relative_error, write_results
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pegboard.contracts.attention import AttentionLayer, AttentionNeed, LayerCache
from pegboard.contracts.batch import Bounds, Rows
from pegboard.contracts.device import DeviceFacts
from pegboard.dtypes import torch_dtype
from pegboard_attention.flash_decoding import FlashDecoding

HEADS, KV_HEADS, SIZE = 32, 8, 128
#: (rows, context) -> microseconds of FlashAttention-3, pages of 16
POINTS = {
    (1, 1024): 11.4,
    (1, 8192): 16.1,
    (1, 32768): 43.5,
    (1, 131072): 139.0,
    (8, 1024): 14.9,
    (8, 8192): 72.8,
    (64, 1024): 77.5,
    (64, 4096): 259.0,
    (256, 1024): 286.0,
}
LAYER = AttentionLayer(query_heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE, scale=SIZE**-0.5)


class Pool:
    """One cache of random entries that all points read, and the same numbers in float32 by entry."""

    def __init__(self, entries: int, page: int, kv_dtype: str) -> None:
        self.page, self.kv_dtype, self.pages = page, kv_dtype, entries // page
        need = self.need(1, entries)
        layout = FlashDecoding.layouts(need, LAYER, None)[0]
        tensors = {
            spec.name: torch.empty((self.pages, *spec.shape), dtype=torch_dtype(spec.dtype), device="cuda")
            for spec in layout.tensors
        }
        for name in ("k", "v"):
            tensor = tensors[name]
            if tensor.element_size() > 1:
                tensor.normal_()
            elif tensor.dtype == torch.uint8:
                tensor.random_(1, 256)
            else:
                tensor.copy_(torch.randn(tensor.shape, dtype=torch.bfloat16, device="cuda"))
        if "k_scale" in tensors:
            tensors["k_scale"].uniform_(0.005, 0.02)
            tensors["v_scale"].uniform_(0.005, 0.02)
        self.cache = LayerCache(layout=layout, group=0, page_size=page, tensors=tensors)

    def need(self, rows: int, length: int, max_query: int = 1) -> AttentionNeed:
        capability = torch.cuda.get_device_capability()
        return AttentionNeed(
            device=DeviceFacts(type="cuda", index=torch.cuda.current_device(), capability=capability),
            dtype="bfloat16",
            kv_dtype=self.kv_dtype,
            page_size=self.page,
            layers=(LAYER,),
            phase="decode",
            max_query=max_query,
            max_rows=rows,
            max_length=length,
        )

    def dense(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [L, K, D] of a row in float32."""
        found = []
        for name in ("k", "v"):
            tensor = self.cache.tensors[name][pages.long()].float()
            if self.kv_dtype == "bfloat16":
                found.append(tensor.flatten(0, 1))
                continue
            if self.kv_dtype == "int8":
                tensor -= 128
            tensor = tensor.permute(0, 2, 1, 3) if name == "k" else tensor.permute(0, 3, 1, 2)
            scale = self.cache.tensors[f"{name}_scale"][pages.long()].permute(0, 2, 1)
            found.append((tensor * scale[..., None]).flatten(0, 1))
        return found[0], found[1]


def oracle(pool: Pool, q: Tensor, table: Tensor) -> Tensor:
    """q [H, D] over one row's pages, in float64."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in pool.dense(table))
    weights = (torch.einsum("hd,ehd->he", q.double(), k) * LAYER.scale).softmax(-1)
    return torch.einsum("he,ehd->hd", weights, v)


class Work:
    """One point over one pool: tables of different pages for each call."""

    def __init__(self, pool: Pool, rows: int, context: int) -> None:
        width = context // pool.page
        size = rows * context * (_row_bytes(pool))
        self.size, self.rows, self.context, self.pool = size, rows, context, pool
        count = min(copies_for(size), pool.pages // (rows * width))
        ids = torch.randperm(pool.pages, device="cuda")[: count * rows * width]
        self.tables = list(ids.to(torch.int32).view(count, rows, width))
        self.q = torch.randn(rows, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
        self.lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")

    def step(self, table: Tensor) -> Rows:
        bounds = Bounds(rows=self.rows, tokens=self.rows, max_query=1, min_query=1, max_kv=self.context)
        return Rows(
            query_start=self.starts,
            kv_len=self.lengths,
            page_table=table,
            row_slot=self.starts.long()[1:],
            ancestors=None,
            bounds=bounds,
        )

    def ours(self, backend: FlashDecoding | None = None) -> dict[str, Any]:
        need = self.pool.need(self.rows, self.context)
        backend = backend or FlashDecoding.create(need, None)
        workspace = {s.name: torch.empty(s.shape, device="cuda") for s in backend.workspace()}
        plans = [backend.plan(self.step(table), LAYER, workspace) for table in self.tables]
        calls = [partial(backend.forward, self.q, None, None, self.pool.cache, plan) for plan in plans]
        out = calls[-1]()
        time = microseconds(calls)  # before the oracle, which would leave the device with lowered clocks
        checked = sorted({0, self.rows // 2, self.rows - 1})
        right = torch.stack([oracle(self.pool, self.q[r], self.tables[-1][r]) for r in checked])
        return {
            "us": time,
            "ceiling": f"{self.size / time / 1e3 / READ_CEILING:.0%}",
            "error": relative_error(out[checked], right),
            "schedule us": microseconds([lambda: backend.plan(self.step(self.tables[0]), LAYER, workspace)] * 8),
        }

    def sdpa(self) -> dict[str, Any]:
        """torch over dense K/V [b, K, L, D]."""
        count = len(self.tables)
        shape = (self.rows, KV_HEADS, self.context, SIZE)
        pairs = [[torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(count)]
        q = self.q[:, :, None]
        calls = [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in pairs]
        out = calls[-1]()[0, :, 0]
        k, v = (x[0].double().repeat_interleave(HEADS // KV_HEADS, 0) for x in pairs[-1])
        weights = (torch.einsum("hd,hed->he", self.q[0].double(), k) * LAYER.scale).softmax(-1)
        right = torch.einsum("he,hed->hd", weights, v)
        return {"sdpa us": microseconds(calls), "sdpa error": relative_error(out, right)}


def _row_bytes(pool: Pool) -> int:
    """Of one entry"""
    return sum(t.nbytes for t in pool.cache.tensors.values()) // (pool.pages * pool.page)


def run(pages: Sequence[int], kv_dtypes: Sequence[str], peers: bool = True) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    bf16: dict[tuple[int, tuple[int, int]], float] = {}
    for kv_dtype in kv_dtypes:
        for page in pages:
            pool = Pool(66 * 4096 * 2, page, kv_dtype)
            for point, fa3 in POINTS.items():
                work = Work(pool, *point)
                row: dict[str, Any] = {"kv": kv_dtype, "page": page, "rows x context": f"{point[0]} x {point[1]}"}
                row |= work.ours()
                if kv_dtype == "bfloat16":
                    bf16[page, point] = row["us"]
                    row |= {"fa3 us": fa3, "of fa3": fa3 / row["us"]}
                    if peers and page == pages[0]:
                        row |= work.sdpa()
                elif (page, point) in bf16:
                    row["of bf16"] = bf16[page, point] / row["us"]
                rows.append(row)
            del pool
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=int, action="append", help="page size; may be given again (64)")
    parser.add_argument("--kv-dtype", action="append", help="may be given again (bfloat16, int8, float8_e4m3fn)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "h200")
    chosen = parser.parse_args()
    rows = run(chosen.page or [64], chosen.kv_dtype or ["bfloat16", "int8", "float8_e4m3fn"])
    print_table(rows)
    print(write_results("attention_decode", rows, chosen.results))


if __name__ == "__main__":
    main()
