"""Speed of an assembled engine on random prompts.

Prompts are of ids drawn anew for every run, so that nothing is found in the prefix cache; ends of text are ignored, so
that every run has the length that was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from random import Random

import msgspec

from ..contracts.sampler import SamplingParams
from ..engine import Engine
from ..errors import ConfigError, RequestFailed
from ..request import Request, RequestOutput

#: New tokens of the shorter run of an ITL pair.
_SHORT = 8


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
    """Time between tokens with `batch` sequences running: (seconds for a long run - for a short one) / tokens more, of
    the best of the repeats of each."""

    batch: int
    seconds: float
    tokens_per_second: float


class Prompts:
    """Random prompts of one seed, none like another."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._random = Random(seed)
        self._vocabulary = engine.plan.vocab_limit

    def draw(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocabulary) for _ in range(length)] for _ in range(count)]


def measure_throughput(engine: Engine, prompts: Prompts, count: int, input: int, output: int) -> Throughput:
    """RequestFailed when one of the requests fails."""
    generate_greedy(engine, prompts.draw(1, input), 2)  # warm
    seconds, outputs = generate_greedy(engine, prompts.draw(count, input), output)
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
        for _ in range(2 if _records(engine) else 1):
            generate_greedy(engine, prompts.draw(1, length), 1)
        times = sorted(generate_greedy(engine, prompts.draw(1, length), 1)[0] for _ in range(repeats))
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
    check_batches(engine, batches)
    for batch in batches:
        if _records(engine):
            for length in (_SHORT, _SHORT, _SHORT + output):
                generate_greedy(engine, prompts.draw(batch, input), length)
        times = {
            length: min(generate_greedy(engine, prompts.draw(batch, input), length)[0] for _ in range(repeats))
            for length in (_SHORT, _SHORT + output)
        }
        seconds = (times[_SHORT + output] - times[_SHORT]) / output
        yield ITL(batch=batch, seconds=seconds, tokens_per_second=batch / seconds)


def _records(engine: Engine) -> bool:
    """Whether a step of a new shape takes long, and so does the next one when the shape returns."""
    return engine.plan.device.type == "cuda" and engine.config.cuda_graphs


def check_batches(engine: Engine, batches: Sequence[int]) -> None:
    """ConfigError: the engine does not run so many sequences at once."""
    rows = engine.config.max_rows
    if max(batches) > rows:
        raise ConfigError(f"a batch of {max(batches)} can't run at once: max_rows is {rows}")


def generate_greedy(engine: Engine, prompts: Sequence[Sequence[int]], output: int) -> tuple[float, list[RequestOutput]]:
    """`output` tokens of each prompt; as `run_requests`."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return run_requests(engine, [Request(prompt=prompt, sampling=sampling) for prompt in prompts])


def run_requests(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[RequestOutput]]:
    """Seconds from the first submission to the last token, and the outputs. RequestFailed when one fails."""
    begin = time.perf_counter()
    outputs = engine.generate(requests)
    seconds = time.perf_counter() - begin
    failed = [found.error for found in outputs if found.error is not None]
    if failed:
        raise RequestFailed(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}")
    return seconds, outputs
