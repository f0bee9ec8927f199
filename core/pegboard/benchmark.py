"""Speed of an assembled engine on random prompts: what `pegboard bench` prints.

Prompts are of ids drawn anew for every run, so that nothing is found in the prefix cache; ends of text are ignored, so
that every run has the length that was asked for.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from random import Random
from typing import Any

import msgspec

from .contracts.sampler import SamplingParams
from .engine import Engine
from .errors import ConfigError, RequestFailed
from .request import RequestOutput

#: New tokens of the shorter run of an ITL pair.
_SHORT = 8


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What ran."""

    model: str
    device: str
    dtype: str
    threads: int
    parts: dict[str, str]
    versions: dict[str, str]
    date: str


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """All prompts submitted at once, to the last token."""

    prompts: int
    input_tokens: int
    output_tokens: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    tokens_per_second: float


class TTFT(msgspec.Struct, frozen=True, kw_only=True):
    """Submission to first token of a lone prompt; the best and the median of the repeats."""

    input_tokens: int
    best: float
    median: float
    #: Prompt tokens a second, of the best.
    tokens_per_second: float


class ITL(msgspec.Struct, frozen=True, kw_only=True):
    """Time between tokens with `batch` sequences running: (seconds for a long run - for a short one) / tokens more, the
    best of the repeats."""

    batch: int
    seconds: float
    tokens_per_second: float


def setup(engine: Engine) -> Setup:
    import torch

    plan, threads = engine.plan, engine.config.threads
    return Setup(
        model=plan.model,
        device=f"{plan.device.type} ({plan.device.name or platform.machine()})",
        dtype=plan.dtype,
        threads=torch.get_num_threads() if threads is None else threads,
        parts={where: part.name for where, part in plan.parts.items()},
        versions={"pegboard": metadata.version("pegboard"), "torch": str(torch.__version__)},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class Prompts:
    """Random prompts of one seed, none like another."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._random = Random(seed)
        self._vocabulary = engine.plan.vocab_limit

    def draw(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocabulary) for _ in range(length)] for _ in range(count)]


def measure_throughput(engine: Engine, prompts: Prompts, count: int, input: int, output: int) -> Throughput:
    """RequestFailed when one of the requests fails."""
    _run(engine, prompts.draw(1, input), 2)  # warm
    seconds, outputs = _run(engine, prompts.draw(count, input), output)
    new = sum(len(found.token_ids) for found in outputs)
    return Throughput(
        prompts=count,
        input_tokens=count * input,
        output_tokens=new,
        seconds=seconds,
        requests_per_second=count / seconds,
        output_tokens_per_second=new / seconds,
        tokens_per_second=(count * input + new) / seconds,
    )


def measure_ttft(engine: Engine, prompts: Prompts, lengths: Sequence[int], repeats: int) -> Iterator[TTFT]:
    """RequestFailed when one of the requests fails."""
    for length in lengths:
        _run(engine, prompts.draw(1, length), 1)  # warm
        times = sorted(_run(engine, prompts.draw(1, length), 1)[0] for _ in range(repeats))
        yield TTFT(
            input_tokens=length,
            best=times[0],
            median=times[len(times) // 2],
            tokens_per_second=length / times[0],
        )


def measure_itl(
    engine: Engine, prompts: Prompts, batches: Sequence[int], input: int, output: int, repeats: int
) -> Iterator[ITL]:
    """ConfigError: the engine does not run so many sequences at once. RequestFailed when one of the requests fails."""
    rows = engine.config.max_rows
    if max(batches) > rows:
        raise ConfigError(f"a batch of {max(batches)} can't run at once: max_rows is {rows}")
    for batch in batches:
        pairs = []
        for _ in range(repeats):
            short, _ = _run(engine, prompts.draw(batch, input), _SHORT)
            long, _ = _run(engine, prompts.draw(batch, input), _SHORT + output)
            pairs.append((long - short) / output)
        yield ITL(batch=batch, seconds=min(pairs), tokens_per_second=batch / min(pairs))


def _run(engine: Engine, prompts: Sequence[Sequence[int]], output: int) -> tuple[float, list[RequestOutput]]:
    """Seconds from the first submission to the last token, and the outputs."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    begin = time.perf_counter()
    outputs: list[Any] = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - begin
    failed = [found.error for found in outputs if found.error is not None]
    if failed:
        raise RequestFailed(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}")
    return seconds, outputs
