"""Serving at real sizes with random weights: ready time, TTFT, ITL and throughput, beside vLLM's numbers.

    python benchmarks/e2e.py [--model llama-8b --model qwen3-0.6b] [--json FILE] [--profile FOLDER]
    python benchmarks/e2e.py --plot FILE

Each run is `pegboard bench e2e` in a process of its own, so that ready time counts from a fresh one: first with an
empty Triton cache (plain sampling), then with a warm one (the same requests with top-k and top-p; then 1,024 with
plain sampling, once). `--plot` draws docs/images/serving.png, without a GPU; it needs matplotlib.
`vllm`: 0.24.0 on one H200 (torch 2.11, CUDA 13.0), the same work, measured once and not in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: ITL by batch, TTFT by prompt, in ms; output tokens a second; ready time in s.
VLLM: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "ready": 72.7,
        "ttft": {512: 15.9, 2048: 52.2, 8192: 212.0},
        "itl": {1: 4.91, 8: 5.02, 32: 5.48, 128: 7.21, 256: 11.06},
        "plain": 9730,
        "top-k, top-p": 6066,
        "1024 requests": 10551,
    },
    "qwen3-0.6b": {
        "ready": 76.6,
        "ttft": {512: 8.5, 2048: 19.1},
        "itl": {1: 1.62, 8: 1.75, 32: 2.13, 128: 3.17, 256: 4.62},
        "plain": 22947,
        "top-k, top-p": 10229,
        "1024 requests": 17639,
    },
}
SAMPLED = ["--top-k", "50", "--top-p", "0.9"]


def run(shape: str, arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "pegboard", "bench", "e2e", "--shape", shape, "--json", *arguments]
    command += ["--temperature", "0.6", "--request-input", "100:1024", "--request-output", "100:1024"]
    command += ["--set", "max_rows=256"]
    begin = time.perf_counter()
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)}\n{found.stderr[-3000:]}")
    return {**json.loads(found.stdout), "process_seconds": time.perf_counter() - begin}


def measure(shape: str, profile: Path | None) -> dict[str, Any]:
    """The three runs of a shape."""
    known = VLLM[shape]
    full = [option for length in known["ttft"] for option in ("--input", str(length))]
    full += [option for batch in known["itl"] for option in ("--batch", str(batch))]
    full += ["--requests", "256", "--repeats", "3"] + (["--profile", str(profile / shape)] if profile else [])
    brief = ["--input", "512", "--batch", "1", "--repeats", "1", "--output", "16"]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        return {
            "plain": run(shape, full, environment),
            "top-k, top-p": run(shape, [*brief, "--requests", "256", *SAMPLED], environment),
            "1024 requests": run(shape, [*brief, "--requests", "1024", "--once"], environment),
        }


def rows_of(known: dict[str, Any], found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What was measured, and vLLM's."""
    plain = found["plain"]
    rows: list[tuple[str, float, float]] = [
        ("ready, empty Triton cache, s", plain["ready"]["first_token"], known["ready"]),
        ("ready, warm Triton cache, s", found["top-k, top-p"]["ready"]["first_token"], known["ready"]),
    ]
    rows += [
        (f"TTFT {t['input_tokens']}, ms", t["best"] * 1e3, known["ttft"][t["input_tokens"]]) for t in plain["ttft"]
    ]
    rows += [(f"ITL batch {i['batch']}, ms", i["seconds"] * 1e3, known["itl"][i["batch"]]) for i in plain["itl"]]
    for name in ("plain", "top-k, top-p", "1024 requests"):
        for turn, field in (("first", "throughput"), ("again", "throughput_again")):
            if found[name][field] is not None:
                rows.append((f"{name}, {turn}, tokens/s", found[name][field]["output_tokens_per_second"], known[name]))
    return rows


def lines(shape: str, known: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """And the ratio: below 1 is less time, above 1 more throughput."""
    plain = found["plain"]
    return [
        f"{shape} on {plain['setup']['device']}, {plain['setup']['dtype']}; same tokens again "
        f"{plain['repeated']['match']:.3f}",
        f"{'':42} {'pegboard':>10} {'vllm':>10} {'ratio':>7}",
        *(
            f"{name:42} {ours:10.2f} {theirs:10.2f} {ours / theirs:7.2f}"
            for name, ours, theirs in rows_of(known, found)
        ),
    ]


def plot(record: dict[str, Any], path: Path) -> None:
    """How many times as fast as vLLM, a group of bars a model."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(figsize=(5.6, 3.2), dpi=110)
    rows = {shape: rows_of(VLLM[shape], found) for shape, found in record["pegboard"].items()}
    names = [name for name, _, _ in max(rows.values(), key=len)]
    for index, (shape, measured) in enumerate(rows.items()):
        gains = [ours / theirs if name.endswith("tokens/s") else theirs / ours for name, ours, theirs in measured]
        places = [len(names) - 1 - names.index(name) + 0.2 - 0.4 * index for name, _, _ in measured]
        axes.barh(places, gains, 0.4, color=("#1f77b4", "#8fbce6")[index % 2], label=shape)
    axes.set_yticks([len(names) - 1 - place for place in range(len(names))], names, fontsize=6)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set(title="Times as fast as vLLM 0.24 (recorded)", xscale="log")
    ticks = (0.5, 1, 2, 4, 8)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(VLLM))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw this file's numbers and measure nothing")
    parser.add_argument("--image", type=Path, default=Path(__file__).parents[1] / "docs" / "images" / "serving.png")
    options = parser.parse_args()
    if options.plot is not None:
        plot(json.loads(options.plot.read_text(encoding="utf-8")), options.image)
        return
    found: dict[str, Any] = {}
    for shape in options.model or list(VLLM):
        found[shape] = measure(shape, options.profile)
        print("\n".join(lines(shape, VLLM[shape], found[shape])), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"vllm": VLLM, "pegboard": found}, indent=1))


if __name__ == "__main__":
    main()
