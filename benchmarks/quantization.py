"""What `pegboard quantize` costs in perplexity, by scheme, method and group.

    python benchmarks/quantization.py --model smollm2-135m-instruct --results benchmarks/results/cpu

The text is the language reference that Python's own help shows (`pydoc_data.topics`): its first four fifths calibrate,
pieces of the last one are measured. A minute or two a row on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec

from pegboard.quantizing import quantize

#: scheme, method, group
ROWS = (
    ("int8", "rtn", -1),
    ("int4", "rtn", 32),
    ("int4", "rtn", 128),
    ("int4", "awq", 128),
    ("int4", "gptq", 128),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=16, help="texts to calibrate with, and to measure")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--only", action="append", default=[], help="scheme:method:group; may be repeated")
    parser.add_argument("--results", type=Path, help="folder for the JSON file")
    given = parser.parse_args()
    chosen = [row for row in ROWS if not given.only or ":".join(map(str, row)) in given.only]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "topics.txt")
        text.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
        for scheme, method, group in chosen:
            start = time.perf_counter()
            report = quantize(
                given.model,
                Path(scratch, f"{scheme}-{method}-{group}"),
                scheme=scheme,
                method=method,
                options={"group": group},
                calibration=text,
                samples=given.samples,
                length=given.length,
                device=given.device,
            )
            seconds = time.perf_counter() - start
            rows.append({"group": group, "seconds": seconds, **msgspec.to_builtins(report)})
    print(table(rows))
    if given.results is not None:
        now = datetime.now(UTC)
        machine = {"processor": platform.processor(), "cores": os.cpu_count(), "system": platform.platform()}
        found = {"date": now.isoformat(timespec="seconds"), "machine": machine, "model": given.model}
        found |= {"text": "pydoc_data.topics", "samples": given.samples, "length": given.length, "rows": rows}
        given.results.mkdir(parents=True, exist_ok=True)
        file = given.results / f"quantization-{now:%Y%m%d-%H%M%S}.json"
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"\n{file}")


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| scheme | method | group | MB | perplexity | more |", "|---|---|---|---|---|---|"]
    if rows:
        lines.append(f"| as it was | | | {rows[0]['bytes_before'] / 1e6:.1f} | {rows[0]['perplexity_before']:.3f} | |")
    for row in rows:
        more = row["perplexity_after"] / row["perplexity_before"] - 1
        size = row["bytes_after"] / 1e6
        name = f"{row['scheme']} | {row['method']} | {row['group']}"
        lines.append(f"| {name} | {size:.1f} | {row['perplexity_after']:.3f} | {more:+.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
