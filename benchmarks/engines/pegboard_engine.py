"""Pegboard's part of `benchmarks/cpu.py`. Prefix reuse is off: repeats must do the work again.

`job["reads"]` names what it reads: "folder", or "model" for the GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from itertools import chain

import torch
from timing import SHORT, measure, read_job

from pegboard import Engine, SamplingParams


def main() -> None:
    job = read_job()
    cache = {"use": "paged", "options": {"prefix_reuse": False}}
    prompts = chain(job["texts"], *job["prefill"])
    longest = max(map(len, prompts)) + SHORT + job["tokens"]
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "threads": job["threads"],
        "max_rows": 8,
        "max_length": longest,
        "cache": cache,
    }
    with Engine(job[job.get("reads", "folder")], quantizer=job["quantizer"], **settings) as engine:

        def generate(prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
            sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
            return [list(output.token_ids) for output in engine.generate([list(p) for p in prompts], sampling)]

        measure(job, generate, {"pegboard": metadata.version("pegboard"), "torch": str(torch.__version__)})


if __name__ == "__main__":
    main()
