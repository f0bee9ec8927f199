"""One report of all that matters to a user: ready time, TTFT, ITL, throughput, host time, memory, and whether a run
that is repeated gives the same tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec
from msgspec.structs import replace

from ..contracts.sampler import SamplingParams
from ..engine import Engine
from ..request import Request
from .host import HostTime, HostWatch
from .profiling import Profile, profile_runs
from .setup import Setup, setup
from .speed import ITL, TTFT, Prompts, Throughput, check_batches, measure_itl, measure_ttft, run_requests

#: Ids of the mixed requests are below.
_MIXED_IDS = 10_000
_FIRST_PROMPT = 16
_PROFILED_TOKENS = 32


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What `measure_end_to_end` runs. `prompt`, `output` and `repeats` are those of ITL; requests have input and output
    lengths drawn from ranges, both ends included."""

    seed: int = 0
    ttft_inputs: Sequence[int] = (128, 512)
    batches: Sequence[int] = (1, 8)
    prompt: int = 128
    output: int = 128
    repeats: int = 2
    requests: int = 16
    request_input: tuple[int, int] = (32, 128)
    request_output: tuple[int, int] = (16, 64)
    #: Run them twice.
    twice: bool = True
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the engine's construction began; imports are in it when it is the first of its process."""

    constructed: float
    first_token: float


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """A greedy batch run twice, nothing of it cached."""

    prompts: int
    tokens: int
    #: Share of the tokens that come before the first difference of their prompt; 1.0: all are equal.
    match: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak bytes of this process, its whole life."""

    #: None: the system does not tell.
    host: int | None
    #: Allocated by torch on the device; None on CPU.
    device: int | None


class EndToEnd(msgspec.Struct, frozen=True, kw_only=True):
    setup: Setup
    load: Load
    ready: Ready
    ttft: list[TTFT]
    itl: list[ITL]
    host: list[HostTime]
    throughput: Throughput
    #: The same requests once more, nothing of them cached: by then the steps are recorded. None: they ran once.
    throughput_again: Throughput | None
    repeated: Repeated
    memory: Memory
    #: With `profile`: a prompt of each length and its first token, then each batch.
    profiles: list[Profile] = []


def measure_end_to_end(
    make: Callable[[Sequence[object]], Engine], load: Load, *, profile: Path | None = None
) -> EndToEnd:
    """`make(watchers)` constructs the engine, which is closed in the end; `profile`: a folder for traces. ConfigError:
    the engine can't run such batches. RequestFailed when a request fails."""
    import torch  # noqa: F401 - ready time is that of an engine, in a process that has it

    watch = HostWatch()
    begin = time.perf_counter()
    engine = make([watch])
    with engine:
        constructed = time.perf_counter() - begin
        prompts = Prompts(engine, load.seed)
        check_batches(engine, load.batches)
        run_requests(engine, [Request(prompt=prompts.draw(1, _FIRST_PROMPT)[0], sampling=_greedy(1))])
        ready = Ready(constructed=constructed, first_token=time.perf_counter() - begin)
        ttft = list(measure_ttft(engine, prompts, load.ttft_inputs, load.repeats))
        itl: list[ITL] = []
        host: list[HostTime] = []
        for batch in load.batches:
            watch.clear()
            itl += measure_itl(engine, prompts, [batch], load.prompt, load.output, load.repeats)
            found = watch.of(batch)
            host += [] if found is None else [found]
        return EndToEnd(
            setup=setup(engine),
            load=load,
            ready=ready,
            ttft=ttft,
            itl=itl,
            host=host,
            throughput=_measure_mixed(engine, load, "first"),
            throughput_again=_measure_mixed(engine, load, "again") if load.twice else None,
            repeated=_repeat(engine, prompts, max(load.batches), load.prompt, load.output),
            memory=_peak_memory(engine),
            profiles=[] if profile is None else profile_runs(engine, prompts, _profiled(load), profile),
        )


def _profiled(load: Load) -> list[tuple[int, int, int]]:
    alone = [(1, length, 1) for length in load.ttft_inputs]
    return alone + [(batch, load.prompt, min(load.output, _PROFILED_TOKENS)) for batch in load.batches]


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def mixed_requests(load: Load, vocabulary: int) -> list[Request]:
    """Ids uniform below 10 000, or in the whole of a smaller vocabulary."""
    random, limit = Random(load.seed), min(_MIXED_IDS, vocabulary)
    return [
        Request(
            prompt=[random.randrange(limit) for _ in range(random.randint(*load.request_input))],
            sampling=SamplingParams(
                temperature=load.temperature,
                top_k=load.top_k,
                top_p=load.top_p,
                seed=load.seed + index,
                max_tokens=random.randint(*load.request_output),
                ignore_eos=True,
            ),
        )
        for index in range(load.requests)
    ]


def _measure_mixed(engine: Engine, load: Load, salt: str) -> Throughput:
    requests = [replace(request, salt=salt) for request in mixed_requests(load, engine.plan.vocab_limit)]
    seconds, outputs = run_requests(engine, requests)
    given = sum(len(found.prompt_token_ids) for found in outputs)
    new = sum(len(found.token_ids) for found in outputs)
    return Throughput(
        prompts=load.requests,
        input_tokens=given,
        output_tokens=new,
        seconds=seconds,
        requests_per_second=load.requests / seconds,
        output_tokens_per_second=new / seconds,
        tokens_per_second=(given + new) / seconds,
    )


def _repeat(engine: Engine, prompts: Prompts, batch: int, input: int, output: int) -> Repeated:
    drawn = prompts.draw(batch, input)
    runs = []
    for salt in ("first", "second"):  # prefixes are shared within a salt only
        requests = [Request(prompt=prompt, sampling=_greedy(output), salt=salt) for prompt in drawn]
        runs.append([list(found.token_ids) for found in run_requests(engine, requests)[1]])
    equal = sum(_equal_begin(one, other) for one, other in zip(*runs, strict=True))
    return Repeated(prompts=batch, tokens=batch * output, match=equal / (batch * output))


def _equal_begin(one: Sequence[int], other: Sequence[int]) -> int:
    differ = (index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differ, len(one))


def _peak_memory(engine: Engine) -> Memory:
    device = None
    if engine.plan.device.type == "cuda":
        import torch

        device = torch.cuda.max_memory_allocated(engine.plan.device.index)
    return Memory(host=_peak_resident(), device=device)


def _peak_resident() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
