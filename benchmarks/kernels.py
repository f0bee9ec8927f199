"""Every GPU kernel beside its peers, in one process: prefill and decode attention, ops, one file, plots.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --part prefill
    python benchmarks/kernels.py --plot benchmarks/results/h200/kernels-....json

Runs `attention_prefill`, `attention_decode` and `ops`; each says how it measures. Peers: SDPA through FlashAttention-2
and cuDNN, cuBLAS, torch's own ops and torch.compile. Beside each number stands its share of a ceiling (streaming read
or copy, or cuBLAS at 8192^3) and its error. `--plot` draws a file's numbers, without a GPU; it needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
PARTS = ("ops", "decode", "prefill")
#: Candidates of the prefill plot and their colours.
PREFILL = {
    "SDPA FA2": "#b8b8b8",
    "SDPA cuDNN": "#707070",
    "pegboard, int8, pages of 64": "#8fbce6",
    "pegboard, pages of 64": "#1f77b4",
}
Rows = list[dict[str, Any]]


def measure(path: Path, parts: Sequence[str]) -> None:
    """Writes {"ops": rows, "decode": rows, "prefill": rows}, those of `parts`, as their scripts give them, with device,
    versions and date; after each, so that a run that is cut short leaves what it had."""
    import attention_decode
    import attention_prefill
    import ops
    import torch
    import triton
    from gpu_timing import READ_CEILING, print_table

    found: dict[str, Any] = {
        "benchmark": "kernels",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_ceiling_gb_s": READ_CEILING,
    }
    runs: dict[str, Callable[[], Rows]] = {
        "ops": ops.run,
        "decode": lambda: attention_decode.run([64], ["bfloat16", "int8", "float8_e4m3fn"]),
        "prefill": lambda: attention_prefill.run(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        for name in parts:
            found[name] = runs[name]()
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            if name == "prefill":
                print(attention_prefill.table(found[name]), flush=True)
            else:
                print_table(found[name])


def plot(record: dict[str, Any], folder: Path) -> list[Path]:
    """prefill.png, decode.png and ops.png, of what the record has."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    pyplot.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    paths = []
    for name, draw in (("prefill", _prefill), ("decode", _decode), ("ops", _ops)):
        if name not in record:
            continue
        figure, axes = pyplot.subplots(figsize=(5.6, 2.7), dpi=110)
        draw(axes, record[name])
        axes.legend(frameon=False, fontsize=7, ncols=2 if name == "decode" else 1)
        figure.text(0.99, 0.01, f"{record['device']}, bfloat16, torch {record['torch']}", ha="right", fontsize=6)
        figure.tight_layout()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], metadata={"Software": None})
        pyplot.close(figure)
    return paths


def _prefill(axes: Any, rows: Rows) -> None:
    for name, colour in PREFILL.items():
        points = [(row["length"], row["tflops"]) for row in rows if row["name"] == name]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=name)
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set(title="Causal prefill, 32 query and 8 KV heads of 128", xlabel="tokens a row", ylabel="TFLOP/s", ylim=0)


def _decode(axes: Any, rows: Rows) -> None:
    """Speed over our own with a bfloat16 cache."""
    points = [row["rows x context"] for row in rows if row["kv"] == "bfloat16"]
    kinds = {"bfloat16": "#1f77b4", "int8": "#8fbce6", "float8_e4m3fn": "#c6dcf2"}
    peers: Rows = [row for row in rows if row["kv"] == "bfloat16"]
    bars = {"FlashAttention-3, pages of 16 (recorded)": ("#b8b8b8", [row["fa3 us"] for row in peers])}
    for kind, colour in kinds.items():
        bars[f"pegboard, {kind}"] = (colour, [row["us"] for row in rows if row["kv"] == kind])
    base = [row["us"] for row in peers]
    width = 0.8 / len(bars)
    for index, (name, (colour, times)) in enumerate(bars.items()):
        heights = [before / time for before, time in zip(base, times, strict=True)]
        axes.bar([i + index * width for i in range(len(points))], heights, width, color=colour, label=name)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(points))], points, rotation=20)
    axes.set(title="Decode attention, speed over pegboard's bfloat16", xlabel="rows x context", ylim=(0, 2.6))


def _ops(axes: Any, rows: Rows) -> None:
    """How many times as fast as torch and cuBLAS."""
    shown = [row for row in rows if _is_shown(row)]
    names = [f"{row['op']}\n{row['shape']}" for row in shown]
    axes.barh(names, [row["torch us"] / row["us"] for row in shown], color="#1f77b4", label="over torch, cuBLAS")
    faster = [
        (name, row["compiled us"] / row["us"]) for name, row in zip(names, shown, strict=True) if "compiled us" in row
    ]
    if faster:
        axes.plot(
            *reversed(list(zip(*faster, strict=True))), "o", color="#ff7f0e", markersize=4, label="over torch.compile"
        )
    axes.axvline(1, color="black", linewidth=0.5)
    axes.tick_params(axis="y", labelsize=5)
    axes.invert_yaxis()
    axes.set(title="Fused ops, times as fast", xscale="log")
    ticks = (1, 2, 5, 10, 20)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _is_shown(row: dict[str, Any]) -> bool:
    """One or two shapes of each op."""
    shapes = ("1 x 4096 -> 6144", "16 x 4096 -> 6144", "1, 8B", "1, 0.6B", "8192 x 4096", "2048 x 28672")
    return row["shape"] in shapes or (row["op"].startswith("rope write") and row["shape"].startswith("8192"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "h200")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; all by default")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw this file's numbers and measure nothing")
    parser.add_argument("--images", type=Path, default=IMAGES)
    chosen = parser.parse_args()
    if chosen.plot is not None:
        for path in plot(json.loads(chosen.plot.read_text(encoding="utf-8")), chosen.images):
            print(path)
        return
    name = "_".join(["kernels", *(chosen.part or ())])
    path = chosen.results / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    measure(path, chosen.part or PARTS)
    print(path)


if __name__ == "__main__":
    main()
