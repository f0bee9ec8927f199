"""What the kernel benchmarks share: CUDA-graph timing, errors, and the file of results.

A work is a list of calls over different buffers, so that replays find a cold L2; its time is that of a graph of all
calls divided by their number, the median of several replays."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

#: Bytes that the calls of one graph should touch at least: several times the L2.
COLD_BYTES = 250_000_000
#: Streaming read of one H200 by a plain sum, GB/s
READ_CEILING = 4420.0
Call = Callable[[], Any]


def copies_for(size: int, most: int = 64) -> int:
    """How many buffers of `size` bytes make the L2 cold."""
    return max(2, min(most, -(-COLD_BYTES // size)))


def microseconds(calls: Sequence[Call], target_ms: float = 2.5, repeats: int = 7) -> float:
    """Time of one call, on the device alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()

        def captured(times: int) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(times):
                    for call in calls:
                        call()
            return graph

        def replay(graph: torch.cuda.CUDAGraph) -> float:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            graph.replay()
            after.record(stream)
            stream.synchronize()
            return before.elapsed_time(after)

        graph = captured(1)
        replay(graph)
        times = max(1, min(200, int(target_ms / replay(graph))))
        if times > 1:
            graph = captured(times)
        replay(graph)
        found = [replay(graph) / times for _ in range(repeats)]
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(found) * 1e3 / len(calls)


def relative_error(found: Tensor, right: Tensor) -> float:
    """|found - right| / |right| in float64; infinite for NaN."""
    error = ((found.double() - right.double()).norm() / right.double().norm()).item()
    return error if error == error else float("inf")


def write_results(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """JSON with device, versions and date."""
    now = datetime.now(UTC)
    record = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_ceiling_gb_s": READ_CEILING,
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{now:%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1))
    return path


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line a row, columns as wide as they need."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_text(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.2f}"
    return str(value)
