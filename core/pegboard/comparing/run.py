"""Run two configs on the same prompts and hold what they compute against each other.

A runs first: its tokens, its speed, and then once more with everything recorded. B does the same, and where it is
recorded it must choose A's tokens, so that both have computed the same texts. One engine is loaded at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig, load_config
from ..contracts.sampler import SamplingParams
from ..engine import Engine
from ..errors import ConfigError, RequestFailed
from ..request import Prompt, Request, RequestOutput
from ..tolerances import DRIFT
from .errors import Errors
from .prompts import default_prompts
from .report import Comparison, Side, Speed, Tokens

if TYPE_CHECKING:
    from torch import Tensor

    from .probe import Key, Probe

Progress = Callable[[int, int], None] | None


def compare(
    a: EngineConfig,
    b: EngineConfig,
    prompts: Sequence[Prompt] = (),
    *,
    max_tokens: int = 16,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    repeats: int = 2,
    positions: int = 256,
    tolerance: float | None = None,
    plugins: Sequence[object] = (),
    progress: Progress = None,
) -> Comparison:
    """Both configs must run on the executor `local`, and models of one shape. Without `prompts`: built-in ones.

    `positions`: tokens of a prompt whose intermediate results are compared; `tolerance`: of relative errors, by
    default that of the coarser dtype; `repeats`: runs for the speed. ConfigError, InvalidRequest, RequestFailed.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, ignore_eos=True
    )
    first = _Run(a, sampling, repeats, positions, plugins, progress)
    with first:
        chosen = list(prompts) or default_prompts(first.has_texts, first.vocabulary)
        of_a = first.measure(chosen)
        records = [first.record(found.prompt_token_ids) for found in of_a]
    second = _Run(b, sampling, repeats, positions, plugins, progress)
    with second:
        if second.shape != first.shape:
            raise ConfigError(f"the models differ, so nothing in them can be compared: {first.shape}, {second.shape}")
        of_b = second.measure([found.prompt_token_ids for found in of_a])
        limit = max(DRIFT[first.side.dtype], DRIFT[second.side.dtype]) if tolerance is None else tolerance
        errors = Errors(limit, greedy=temperature == 0)
        for index, (tokens, record) in enumerate(records):
            _, other = second.record(of_a[index].prompt_token_ids, tokens)
            errors.add(index, record, other)
            record.clear()  # as large as everything that the model computed
    parts = errors.parts()
    differing = [part for part in parts if part.differs]
    return Comparison(
        a=first.side,
        b=second.side,
        tolerance=limit,
        agree=not differing,
        first=differing[0] if differing else None,
        parts=parts,
        tokens=_compare_tokens(of_a, of_b),
        ties=errors.ties,
        speed_a=first.speed,
        speed_b=second.speed,
    )


class _Run:
    """One engine, from loading to closing."""

    def __init__(
        self,
        config: EngineConfig,
        sampling: SamplingParams,
        repeats: int,
        positions: int,
        plugins: Sequence[object],
        progress: Progress,
    ) -> None:
        from .executor import NAME, ProbePlugin
        from .probe import Probe

        if config.executor.use not in ("auto", "local"):
            raise ConfigError(f"executor = {config.executor.use!r}: a comparison looks into the executor local only")
        self._sampling, self._repeats = sampling, repeats
        self._probe: Probe = Probe(positions)
        self._salts = itertools.count()
        # Nothing runs beside what is compared.
        self._config = load_config(config, {"executor": NAME, "shadow": None, "observers": []})
        self._plugins, self._progress = [*plugins, ProbePlugin(self._probe)], progress
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._engine = engine = self._exit.enter_context(
            Engine(config=self._config, plugins=self._plugins, progress=self._progress)
        )
        plan, device = engine.plan, engine.plan.device
        self.vocabulary, self.has_texts = plan.vocab_limit, engine.has_tokenizer
        self.shape = (
            f"{plan.parts['model'].name} of {sum(len(group.layers) for group in plan.groups)} layers "
            f"and {plan.vocab_limit} tokens"
        )
        self.side = Side(
            model=plan.model,
            device=device.type if device.name in ("", device.type) else f"{device.type} ({device.name})",
            dtype=plan.dtype,
            parts={where: part.name for where, part in plan.parts.items() if where != "executor"},
        )

    def __exit__(self, *exc: Any) -> None:
        self._exit.close()
        del self._engine

    def measure(self, prompts: Sequence[Prompt]) -> list[RequestOutput]:
        """Each prompt alone, with its own tokens; the speed is kept in `speed`."""
        self._run(prompts[0])  # warm
        runs = [[self._run(prompt) for prompt in prompts] for _ in range(self._repeats)]
        prefill, decode = [], []
        for outputs in runs:
            metrics = [found.metrics for found in outputs]
            prefill.append(sum(m.prompt_tokens for m in metrics) / sum(m.ttft or 0.0 for m in metrics))
            more = sum(m.output_tokens - 1 for m in metrics)
            if more:
                decode.append(more / sum((m.itl or 0.0) * (m.output_tokens - 1) for m in metrics))
        self.speed = Speed(prefill=max(prefill), decode=max(decode, default=None))
        return runs[0]

    def record(
        self, prompt: Sequence[int], forced: Sequence[int] | None = None
    ) -> tuple[tuple[int, ...], dict[Key, Tensor]]:
        """(tokens, everything that was computed for them)"""
        self._probe.begin(forced)
        tokens = self._run(prompt).token_ids
        return tokens, self._probe.end()

    def _run(self, prompt: Prompt) -> RequestOutput:
        # A salt of its own, so that nothing is found in the prefix cache.
        request = Request(prompt=prompt, sampling=self._sampling, salt=f"compare {next(self._salts)}")
        output = self._engine.generate(request)
        if output.error is not None:
            raise RequestFailed(f"the prompt {prompt!r:.60}: {output.error}")
        return output


def _compare_tokens(a: Sequence[RequestOutput], b: Sequence[RequestOutput]) -> Tokens:
    first, equal = None, 0
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        same = sum(1 for _ in _equal_begin(one.token_ids, other.token_ids))
        equal += same
        if first is None and same < len(one.token_ids):
            first = (index, same)
    total = sum(len(found.token_ids) for found in a)
    return Tokens(prompts=len(a), tokens=total, equal=equal / total, first_difference=first)


def _equal_begin(one: Sequence[int], other: Sequence[int]) -> Iterator[Any]:
    return itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
