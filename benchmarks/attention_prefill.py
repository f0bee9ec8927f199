"""Prefill attention on one GPU: flash_attention_2 over pages and over K/V side by side, and torch's SDPA.

    python benchmarks/attention_prefill.py

32 query and 8 KV heads of 128, causal, bfloat16, 16k tokens in all. TFLOP/s count half of all scores: 4 * b * s^2 * H *
D / 2 operations. Times are medians, between events, with cold L2. The chip's power is the limit, and what ran just
before decides how much of it is left: so candidates take short turns in changing order, without a pause. `error` is the
norm of the difference from attention in float64 over its norm, for a few heads. SDPA gets contiguous K/V; pages are
shuffled. INT8 pages hold the same numbers, so their `error` is mostly that of eight bits.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pegboard.contracts.attention import AttentionLayer, AttentionNeed, LayerCache
from pegboard.contracts.batch import Bounds, Rows
from pegboard.contracts.device import DeviceFacts
from pegboard_attention.flash_attention_2.backend import FlashAttention2
from pegboard_attention.flash_attention_2.paths import choose_path
from pegboard_attention.flash_attention_2.problem import Entries, Forward, Mixing
from pegboard_attention.flash_attention_2.schedule import make_schedule

HERE = Path(__file__).parent
TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
PAGE_SIZES = (16, 64, 128)
MIXING = Mixing(query_heads=32, kv_heads=8, head_size=128, scale=128**-0.5)
PEERS = {"SDPA FA2": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


class Candidate(NamedTuple):
    launch: Callable[[], object]
    #: [B, s, H, D]
    result: Callable[[], Tensor]


def candidates(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Candidate]:
    """q [B, s, H, D], k and v [B, s, K, D]"""
    made = {name: _peer(backend, q, k, v) for name, backend in PEERS.items()}
    for page_size in PAGE_SIZES:
        made[f"pegboard, pages of {page_size}"] = _ours(q, _paged(k, v, page_size))
    batch, length = q.shape[:2]
    starts = torch.arange(batch, dtype=torch.int32, device=q.device) * length
    made["pegboard, int8, pages of 64"] = _eight_bit(q, k, v, 64)
    made["pegboard, side by side"] = _ours(q, Entries(k.flatten(0, 1)[None], v.flatten(0, 1)[None], starts=starts))
    return made


def _peer(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Candidate:
    query, key, value = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def launch() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return Candidate(launch, lambda: launch().transpose(1, 2))


def _paged(k: Tensor, v: Tensor, page_size: int) -> Entries:
    batch = k.shape[0]
    pages = k.shape[0] * k.shape[1] // page_size
    place = torch.randperm(pages, device=k.device)
    pools = [torch.empty(pages, page_size, *x.shape[2:], dtype=x.dtype, device=x.device) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[place] = x.reshape(pool.shape)
    return Entries(*pools, table=place.int().view(batch, -1))


def _ours(q: Tensor, entries: Entries) -> Candidate:
    batch, length = q.shape[:2]
    path = choose_path("auto", torch.cuda.get_device_capability(), "bfloat16", MIXING.head_size)
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    schedule = make_schedule(
        steps * length,
        torch.full((batch,), length, dtype=torch.int32, device=q.device),
        tokens=batch * length,
        max_query=length,
        tile_tokens=path.tiling.rows // MIXING.packed_heads(path.tiling.rows),
        block=path.tiling.block,
    )
    call = Forward(q.flatten(0, 1), entries, schedule, MIXING, path.tiling, torch.empty_like(q).flatten(0, 1))

    def result() -> Tensor:
        call.out.fill_(torch.nan)
        path.launch(call)
        return call.out.view(q.shape)

    return Candidate(lambda: path.launch(call), result)


def _eight_bit(q: Tensor, k: Tensor, v: Tensor, page_size: int) -> Candidate:
    """The part as an engine calls it, over INT8 pages."""
    batch, length = q.shape[:2]
    layer = AttentionLayer(query_heads=32, kv_heads=8, head_size=128, scale=MIXING.scale)
    device = DeviceFacts(type="cuda", capability=torch.cuda.get_device_capability())
    need = AttentionNeed(
        device=device,
        dtype="bfloat16",
        kv_dtype="int8",
        page_size=page_size,
        layers=(layer,),
        phase="prefill",
        max_query=length,
        max_rows=batch,
        max_length=max(length, TOKENS),
    )
    backend = FlashAttention2.create(need, None)
    paged = _paged(k, v, page_size)
    tensors = {}
    for name, pages in (("k", paged.k), ("v", paged.v)):
        scale = pages.abs().amax(-1, keepdim=True).float() / 127
        codes = (pages / scale).round().add(128).to(torch.uint8)
        tensors[name] = codes.permute(0, 2, 1, 3) if name == "k" else codes.permute(0, 2, 3, 1)
        tensors[f"{name}_scale"] = scale[..., 0].transpose(1, 2)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    layout = FlashAttention2.layouts(need, layer, None)[0]
    cache = LayerCache(layout=layout, group=0, page_size=page_size, tensors=tensors)
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    rows = Rows(
        query_start=steps * length,
        kv_len=torch.full((batch,), length, dtype=torch.int32, device=q.device),
        page_table=paged.table,
        row_slot=steps.long()[1:],
        ancestors=None,
        bounds=Bounds(rows=batch, tokens=batch * length, max_query=length, min_query=length, max_kv=length),
    )
    workspace = {s.name: torch.empty(s.shape, dtype=torch.bfloat16, device=q.device) for s in backend.workspace()}
    plan = backend.plan(rows, layer, workspace)
    flat = q.flatten(0, 1)

    def launch() -> Tensor:
        return backend.forward(flat, None, None, cache, plan)

    return Candidate(launch, lambda: launch().view(q.shape))


def in_turns(launches: dict[str, Callable[[], object]], turns: int, milliseconds: float) -> dict[str, list[float]]:
    """Seconds of each launch. In each turn, all have about `milliseconds`; the first is for warming up."""
    cold = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = {name: list[float]() for name in launches}
    counts = dict.fromkeys(launches, 1)
    for turn in range(turns + 1):
        shift = turn * 3 % len(launches)
        order = [*launches][shift:] + [*launches][:shift]
        marks = []
        for name in order[:: 1 if turn % 2 else -1]:
            for _ in range(counts[name]):
                cold.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                launches[name]()
                end.record()
                marks.append((name, start, end))
        torch.cuda.synchronize()
        found = [(name, start.elapsed_time(end)) for name, start, end in marks]
        if turn == 0:
            counts = {name: max(1, round(milliseconds / time)) for name, time in found}
            continue
        for name, time in found:
            times[name].append(time / 1e3)
    return times


def matmul_ceiling(milliseconds: int = 100) -> float:
    """TFLOP/s of cuBLAS at 8192^3 in bfloat16, timed like the rest."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    time = triton.testing.do_bench(lambda: a @ b, rep=milliseconds, return_mode="median")
    return 2 * 8192**3 / time / 1e9


def truth(q: Tensor, k: Tensor, v: Tensor, row: int, head: int) -> Tensor:
    """[s, D] in float64"""
    shared = head // (MIXING.query_heads // MIXING.kv_heads)
    key, value = k[row, :, shared].double(), v[row, :, shared].double()
    parts = []
    for start in range(0, q.shape[1], 2048):
        queries = q[row, start : start + 2048, head].double()
        end = start + len(queries)
        scores = queries @ key[:end].T * MIXING.scale
        hidden = torch.ones(scores.shape, dtype=torch.bool, device=q.device).triu(start + 1)
        parts.append(scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ value[:end])
    return torch.cat(parts)


def run(lengths: Sequence[int] = LENGTHS, turns: int = 24, milliseconds: float = 8) -> list[dict[str, Any]]:
    """One record a length and candidate: length, name, tflops (median), of matmul (share of cuBLAS at 8192^3), seconds
    (least, quartiles, most), launches, error."""
    records = []
    ceiling = matmul_ceiling()
    torch.manual_seed(0)
    for length in lengths:
        batch = max(1, TOKENS // length)
        shapes = [(batch, length, heads, MIXING.head_size) for heads in (MIXING.query_heads, *[MIXING.kv_heads] * 2)]
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        work = 2 * batch * length**2 * MIXING.query_heads * MIXING.head_size
        samples = [(0, 0), (batch - 1, 13), (batch // 2, 31)]
        exact = torch.stack([truth(q, k, v, row, head) for row, head in samples])
        made = candidates(q, k, v)
        errors = {}
        for name, candidate in made.items():
            found = candidate.result()
            found = torch.stack([found[row, :, head] for row, head in samples]).double()
            errors[name] = float((found - exact).norm() / exact.norm())
        times = in_turns({name: candidate.launch for name, candidate in made.items()}, turns, milliseconds)
        for name, seconds in times.items():
            tflops = work / median(seconds) / 1e12
            spread = [min(seconds), *quantiles(seconds, n=4), max(seconds)]
            records.append(
                {
                    "length": length,
                    "name": name,
                    "tflops": tflops,
                    "of matmul": tflops / ceiling,
                    "seconds": [round(value, 7) for value in spread],
                    "launches": len(seconds),
                    "error": errors[name],
                }
            )
    return records


def table(records: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(record["name"] for record in records))
    lines = ["TFLOP/s (error)".ljust(8) + "".join(name.rjust(26) for name in names)]
    for length in dict.fromkeys(record["length"] for record in records):
        cells = {r["name"]: f"{r['tflops']:.0f} ({r['error']:.1e})" for r in records if r["length"] == length}
        lines.append(f"s={length}".ljust(15) + "".join(cells[name].rjust(26) for name in names))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="TFLOP/s of causal prefill attention.")
    parser.add_argument("--length", type=int, action="append", help="may be repeated; 512 to 32768 by default")
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--milliseconds", type=float, default=8, help="of each candidate in a turn")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "h200")
    options = parser.parse_args()
    records = run(options.length or LENGTHS, options.turns, options.milliseconds)
    now = datetime.now(UTC)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "machine": {"device": torch.cuda.get_device_name(), "system": platform.platform()},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "work": "causal, bfloat16, 32 query and 8 KV heads of 128, 16k tokens in all (one row from there on)",
        "results": records,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"attention_prefill-{now:%Y%m%d-%H%M%S}.json"
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{table(records)}\n\n{target}")


if __name__ == "__main__":
    main()
