"""Where the device's time goes: a trace for chrome://tracing or Perfetto, and a table of kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..engine import Engine
from ..errors import ConfigError
from .speed import Prompts, generate_greedy


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel, all its launches; on CPU one operator without those that it calls."""

    name: str
    count: int
    seconds: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run of `batch` prompts of `input` tokens and `output` new tokens each."""

    batch: int
    input: int
    output: int
    seconds: float
    #: Sum of the kernels' times; on CUDA those overlap where one starts while another ends.
    busy: float
    #: From the end of all kernels before to the start of the next, where that is later; 0 on CPU.
    gaps: float
    kernels: list[KernelTime]
    trace: str


def profile_runs(engine: Engine, prompts: Prompts, runs: Sequence[tuple[int, int, int]], folder: Path) -> list[Profile]:
    """For each (batch, input, output) runs to warm up, and one under torch's profiler, whose trace goes to `folder`.
    ConfigError: the folder can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the profile can't be written to {folder}: {error.strerror}") from error
    return [_profile(engine, prompts, run, folder) for run in runs]


def _profile(engine: Engine, prompts: Prompts, run: tuple[int, int, int], folder: Path) -> Profile:
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    batch, input, output = run
    cuda = engine.plan.device.type == "cuda"
    for _ in range(3 if cuda else 1):  # shapes are recorded when they come again
        generate_greedy(engine, prompts.draw(batch, input), output)
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # steps run in the engine's
    with profile(activities=[activity], experimental_config=every_thread) as profiler:
        seconds, _ = generate_greedy(engine, prompts.draw(batch, input), output)
    trace = folder / f"trace-{batch}-{input}-{output}.json.gz"
    profiler.export_chrome_trace(str(trace))
    if not cuda:
        averages = profiler.key_averages()
        found = [KernelTime(name=e.key, count=e.count, seconds=e.self_cpu_time_total / 1e6) for e in averages]
        return _made(run, seconds, 0.0, found, trace)
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    sums: dict[str, list[float]] = defaultdict(list)
    gaps, reached = 0.0, spans[0][0] if spans else 0.0
    for start, end, name in spans:
        sums[name].append((end - start) / 1e6)
        gaps += max(0.0, start - reached) / 1e6
        reached = max(reached, end)
    found = [KernelTime(name=name, count=len(times), seconds=sum(times)) for name, times in sums.items()]
    return _made(run, seconds, gaps, found, trace)


def _made(run: tuple[int, int, int], seconds: float, gaps: float, found: list[KernelTime], trace: Path) -> Profile:
    batch, input, output = run
    return Profile(
        batch=batch,
        input=input,
        output=output,
        seconds=seconds,
        busy=sum(kernel.seconds for kernel in found),
        gaps=gaps,
        kernels=sorted(found, key=lambda kernel: -kernel.seconds),
        trace=str(trace),
    )
