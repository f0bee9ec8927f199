"""The work that every engine does, and the answer that `benchmarks/cpu.py` reads."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

#: New tokens of the shorter run that decode is measured by.
SHORT = 8

#: (prompts, new tokens) -> the new ids of each, greedy, ends of text ignored.
Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


def read_job() -> dict[str, Any]:
    job: dict[str, Any] = json.load(sys.stdin)
    return job


def measure(job: dict[str, Any], generate: Generate, versions: dict[str, str]) -> None:
    """Time the job and print the answer."""
    tokens, repeats, texts = job["tokens"], job["repeats"], job["texts"]

    def seconds(prompts: Sequence[Sequence[int]], new: int) -> float:
        begin = time.perf_counter()
        generate(prompts, new)
        return time.perf_counter() - begin

    prefill = []
    for warm, *prompts in job["prefill"]:
        generate([warm], 1)
        prefill.append(len(warm) / min(seconds([prompt], 1) for prompt in prompts))
    answer: dict[str, Any] = {"prefill": prefill}
    for batch in (1, len(texts)):
        generate(texts[:batch], 2)
        whole = [seconds(texts[:batch], SHORT + tokens) for _ in range(repeats)]
        short = [seconds(texts[:batch], SHORT) for _ in range(repeats)]
        answer[f"decode_{batch}"] = batch * tokens / (min(whole) - min(short))
        answer[f"end_to_end_{batch}"] = batch * (SHORT + tokens) / min(whole)
    answer["ids"] = generate(texts, tokens)
    print(json.dumps({**answer, "versions": versions}))
