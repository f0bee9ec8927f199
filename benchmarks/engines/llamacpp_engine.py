"""llama.cpp's part of `benchmarks/cpu.py`, through xllamacpp: the GGUF file as it is, quantized."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from importlib import metadata

from timing import SHORT, measure, read_job


def main() -> None:
    import xllamacpp

    job = read_job()
    longest = max(map(len, [*job["texts"], *(prompt for group in job["prefill"] for prompt in group)]))
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.n_parallel = len(job["texts"])
    params.n_ctx = (longest + SHORT + job["tokens"]) * len(job["texts"])
    params.warmup = False
    server = xllamacpp.Server(params)

    def generate(prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        asked = {
            "prompt": [list(prompt) for prompt in prompts],
            "n_predict": new,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        # The door for token ids is the server's own, over loopback
        request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        answers = found if isinstance(found, list) else [found]
        return [list(answer["tokens"]) for answer in sorted(answers, key=lambda answer: answer.get("index", 0))]

    measure(job, generate, {"xllamacpp": metadata.version("xllamacpp")})


if __name__ == "__main__":
    main()
