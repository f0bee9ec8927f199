"""What assembling from plugins costs a step: the same parts wired by hand and through the registry, in pairs.

    python benchmarks/overhead.py --model smollm2-135m-instruct

Every arm runs the loop of a step (schedule, launch, retire, commit) on decode rows of its own. The arms take turns, one
step each, in an order that changes with every round; an arm's overhead is the median of its time less that of `hand` in
the same round. `hand again` is wired like `hand`: what it shows is noise. All arms share one model's weights, since two
copies differ by where they lie in memory. `bound` holds a bootstrap's 95% of the median.

    hand        parts created by their classes, ModelRunner called directly
    assembled   parts found by entry point, chosen by the registry, called through the executor
    observed    the same, with one observer that is told of every step

`hooks` counts pluggy's calls in a run of an Engine: none without an observer, and with one, so many an event.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pluggy
import torch

from pegboard import Engine, EngineConfig, Registry, SamplingParams, hookimpl, load_config
from pegboard.assembly import Assembled, assemble
from pegboard.contracts.cache import CacheNeed
from pegboard.contracts.observer import StepDone, StepTimes
from pegboard.contracts.scheduler import Scheduler, SequenceSpec, StepPlan, StepResult
from pegboard.ops import TorchOps
from pegboard.pairing import Backend, make_groups
from pegboard.registry.observers import Observers
from pegboard.runner.model_runner import ModelRunner
from pegboard.runner.step_shape import Limits
from pegboard.runner.stepping import RunnerParts
from pegboard_attention.torch_backend import TorchAttention
from pegboard_cache.options import PagedOptions
from pegboard_cache.paged import PagedCache
from pegboard_sampling.torch_sampler import TorchSampler
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions

HERE = Path(__file__).parent
PROMPT = 16
#: What `wire_by_hand` makes, by name.
PARTS = {
    "run_ahead": 0,
    "attention": "torch",
    "cache": "paged",
    "scheduler": "continuous",
    "sampler": "torch",
    "ops": "torch",
    "executor": "local",
}
_TIMES = StepTimes(schedule=0.0, launch=0.0, retire=0.0, commit=0.0, emit=0.0)


class Arm:
    """One loop of steps."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        run: Callable[[StepPlan], StepResult | None],
        observers: Observers,
    ) -> None:
        self.name, self.scheduler, self._run, self._observers = name, scheduler, run, observers
        self.tokens: list[int] = []
        self._serial = 0

    def start(self, batch: int, new: int) -> None:
        """Rows of random prompts, the same for every arm; runs their prefill."""
        draw = random.Random(self._serial)
        specs = []
        for _ in range(batch):
            self._serial += 1
            prompt = tuple(draw.randrange(3, 200) for _ in range(PROMPT))
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            specs.append(
                SequenceSpec(
                    id=f"s{self._serial}",
                    prompt=prompt,
                    sampling=sampling,
                    seed=1,
                    max_length=PROMPT + 1 + new,
                    salt=f"{self._serial}",
                )
            )
        self.scheduler.add(specs)
        self.step()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            raise RuntimeError("nothing to do: the rounds are longer than the sequences")
        result = self._run(plan)
        outcome = self.scheduler.commit(result)
        if self._observers.active:  # as the engine does
            event = StepDone(step=plan.id, rows=len(plan.rows), seconds=0.0, waiting=0, running=0, times=_TIMES)
            self._observers.notify("pegboard_step_done", event)
        self.tokens += [token for progress in outcome for token in progress.tokens]


def wire_by_hand(name: str, made: Assembled, model: Any, config: EngineConfig, spec: Any) -> Arm:
    """Every part by its class; `model` is the assembled arm's, for its weights."""
    needs, plan = made.needs, made.plan
    ops = TorchOps.create(needs.ops, None)
    prefill, decode = TorchAttention(needs.prefill), TorchAttention(needs.decode)
    backends = [
        Backend("torch", partial(TorchAttention.layouts, need, options=None)) for need in (needs.prefill, needs.decode)
    ]
    groups = make_groups(spec.layers, backends[0], backends[1], ops)
    cache_need = CacheNeed(
        groups=groups,
        page_size=plan.page_size,
        budget_bytes=plan.memory.kv_cache,
        max_rows=config.max_rows,
        max_length=plan.max_length,
        max_query=needs.decode.max_query,
    )
    cache = PagedCache.create(cache_need, PagedOptions())
    scheduler = ContinuousScheduler.create(needs.scheduler, ContinuousOptions(), cache=cache, clock=time.monotonic)
    parts = RunnerParts(
        model=model, spec=spec, ops=ops, prefill=prefill, decode=decode, sampler=TorchSampler(needs.sampler)
    )
    runner = ModelRunner(
        parts,
        groups=groups,
        pages=cache.pages,
        limits=Limits(
            rows=config.max_rows,
            step_tokens=needs.scheduler.max_step_tokens,
            length=plan.max_length,
            decode_width=needs.scheduler.decode_width,
        ),
        page_size=plan.page_size,
        device=plan.device.type,
        vocab_limit=plan.vocab_limit,
    )
    return Arm(name, scheduler, lambda step: runner.launch(step).result(), Observers())


class Watch:
    """An observer of everything."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @hookimpl
    def pegboard_engine_ready(self, event: object) -> None:
        self.calls["engine_ready"] += 1

    @hookimpl
    def pegboard_request_admitted(self, event: object) -> None:
        self.calls["request_admitted"] += 1

    @hookimpl
    def pegboard_request_finished(self, event: object) -> None:
        self.calls["request_finished"] += 1

    @hookimpl
    def pegboard_step_done(self, event: object) -> None:
        self.calls["step_done"] += 1

    @hookimpl
    def pegboard_engine_closed(self) -> None:
        self.calls["engine_closed"] += 1


def wire_assembled(name: str, config: EngineConfig, watchers: Sequence[object]) -> tuple[Arm, Assembled, Any]:
    made = assemble(config, Registry.discover())
    scheduler, executor, observers = made.build(time.monotonic, None, watchers)

    def run(step: StepPlan) -> StepResult | None:
        executor.launch(step)
        return executor.retire(0)

    return Arm(name, scheduler, run, observers), made, executor


def make_arms(config: EngineConfig) -> list[Arm]:
    assembled, made, executor = wire_assembled("assembled", config, [])
    runner = executor._runner  # the benchmark's own look inside, for the weights
    observed, _, watched = wire_assembled("observed", config, [Watch()])
    watched._runner = watched._runner.with_parts(watched._runner.parts.replace(model=runner.parts.model))
    hands = [wire_by_hand(name, made, runner.parts.model, config, runner.parts.spec) for name in ("hand", "hand again")]
    return [*hands, assembled, observed]


def measure(arms: Sequence[Arm], batch: int, seconds: float, length: int) -> dict[str, list[float]]:
    """Seconds of a step, round by round, of every arm; sequences begin anew after `length` steps."""
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    order, clock = list(arms), time.perf_counter
    shuffle = random.Random(0).shuffle
    until = clock() + seconds
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        while clock() < until:
            for arm in arms:
                arm.start(batch, length)
                for _ in range(3):
                    arm.step()  # warm
            for _ in range(length - 3):
                if clock() > until:
                    break
                shuffle(order)
                for arm in order:
                    begin = clock()
                    arm.step()
                    times[arm.name].append(clock() - begin)
            for arm in arms:
                _drain(arm)
    finally:
        gc.enable()
        gc.unfreeze()
    first = arms[0].tokens
    for arm in arms[1:]:
        if arm.tokens != first:
            raise RuntimeError(f"{arm.name} chose other tokens than {arms[0].name}")
    return times


def _drain(arm: Arm) -> None:
    while arm.scheduler.has_work():
        arm.step()


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Of each arm: median step, and the median of its difference to `hand`, as a share of hand's median."""
    hand = times["hand"]
    base = statistics.median(hand)
    found: dict[str, Any] = {"hand": {"step_ms": base * 1e3, "rounds": len(hand)}}
    for name, own in times.items():
        if name == "hand":
            continue
        differences = [a - b for a, b in zip(own, hand, strict=True)]
        bound = _bootstrap(differences)
        found[name] = {
            "step_ms": statistics.median(own) * 1e3,
            "overhead_us": statistics.median(differences) * 1e6,
            "share": statistics.median(differences) / base,
            "bound": [low_or_high / base for low_or_high in bound],
        }
    return found


def _bootstrap(values: Sequence[float], draws: int = 300) -> tuple[float, float]:
    """95% of the medians of samples drawn from `values`."""
    tensor, generator = torch.tensor(values, dtype=torch.float64), torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)
    medians = tensor[picks].median(dim=1).values
    low, high = torch.quantile(medians, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def count_hooks(config: EngineConfig, requests: int, tokens: int) -> dict[str, Any]:
    """pluggy's calls while an Engine works, without and with an observer."""
    counted: list[str] = []
    original = pluggy.HookCaller.__call__

    def call(self: Any, **arguments: Any) -> Any:
        counted.append(self.name)
        return original(self, **arguments)

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    watch = Watch()
    found: dict[str, Any] = {}
    pluggy.HookCaller.__call__ = call  # type: ignore[method-assign]
    try:
        for name, watchers in (("without an observer", []), ("with one observer", [watch])):
            counted.clear()
            with Engine(config=config, watchers=watchers) as engine:
                engine.generate([[5 + i, 7, 9] for i in range(requests)], sampling)
            found[name] = dict(Counter(hook for hook in counted if hook != "pegboard_parts"))
    finally:
        pluggy.HookCaller.__call__ = original  # type: ignore[method-assign]
    events = {f"pegboard_{event}": count for event, count in watch.calls.items()}
    found["calls per event"] = {hook: count / events[hook] for hook, count in found["with one observer"].items()}
    return found


def assembly_seconds(config: EngineConfig) -> dict[str, float]:
    """Once an engine, the best of three: finding plugins, and deciding everything (no weights)."""
    discover, decide = [], []
    for _ in range(3):
        begin = time.perf_counter()
        registry = Registry.discover()
        middle = time.perf_counter()
        assemble(config, registry)
        discover.append(middle - begin)
        decide.append(time.perf_counter() - middle)
    return {"discover": min(discover), "decide": min(decide)}


def table(results: dict[str, Any]) -> str:
    rows = [["model", "batch", "arm", "step ms", "overhead us", "share", "95% of the median"]]
    for key, found in results.items():
        model, batch = key.rsplit(", batch ", 1)
        for name, arm in found["arms"].items():
            cells = ["-"] * 3
            if name != "hand":
                low, high = arm["bound"]
                cells = [f"{arm['overhead_us']:.1f}", f"{arm['share']:+.2%}", f"{low:+.2%} to {high:+.2%}"]
            rows.append([model, batch, name, f"{arm['step_ms']:.3f}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def run(model: str, name: str, batches: Sequence[int], seconds: float, length: int) -> dict[str, Any]:
    config = load_config(
        {**PARTS, "model": model, "device": "cpu", "max_length": 512, "max_rows": max(batches), "threads": 1}
    )
    results: dict[str, Any] = {}
    for batch in batches:
        times = measure(make_arms(config), batch, seconds, length)
        results[f"{name}, batch {batch}"] = {"arms": summary(times)}
    results[f"{name}, batch {batches[0]}"] |= {
        "hooks": count_hooks(config, requests=3, tokens=5),
        "assembly_seconds": assembly_seconds(config),
    }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of plugins, by step.")
    parser.add_argument("--model", help="besides the tiny model: a file, a folder or a name")
    parser.add_argument("--no-tiny", action="store_true", help="leave the tiny model out")
    parser.add_argument("--batch", type=int, action="append", help="rows of a step; may be repeated; default 1")
    parser.add_argument("--seconds", type=float, default=30.0, help="of measuring, for each model and batch")
    parser.add_argument("--steps", type=int, default=200, help="of a sequence, before another begins")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batches = options.batch or [1]
    results: dict[str, Any] = {}
    if not options.no_tiny:
        from pegboard.testing.tiny import tiny_model

        with tempfile.TemporaryDirectory() as folder:
            path = tiny_model(Path(folder) / "tiny", tokenizer=False)
            results |= run(str(path), "tiny (3 layers of 64)", batches, options.seconds, options.steps)
    if options.model is not None:
        results |= run(options.model, options.model, batches, options.seconds, options.steps)
    now = datetime.now(UTC)
    record = {
        "benchmark": "overhead",
        "date": now.isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "threads": 1},
        "versions": {"torch": str(torch.__version__), "pluggy": pluggy.__version__},
        "results": results,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"overhead-{now:%Y%m%d-%H%M%S}.json"
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{table(results)}\n\n{target}")


if __name__ == "__main__":
    main()
