"""Shadow mode: the chosen parts serve, references run beside them, and nothing but the report changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import ConfigError, Part, SamplingParams, hookimpl, load_config
from pegboard.contracts.attention import AttentionLayer, AttentionNeed, KVLayout
from pegboard.contracts.observer import StepDone
from pegboard.contracts.sampler import SampleOutput, SlotOpening, VerifyRows
from pegboard.contracts.shadow import ShadowStats
from pegboard.ops import TorchOps
from pegboard.runner import LocalExecutor
from pegboard.runner.model_runner import ModelRunner
from pegboard.shadow.log import ShadowLog
from pegboard.shadow.sampler import BesideSampler
from pegboard_attention.torch_backend import TorchAttention
from pegboard_sampling.torch_sampler import TorchSampler

PROMPTS = [[1, 17, 42, 200, 3], [9, 8, 7, *range(30, 70)], [5, 6]]
NOISE = SamplingParams(seed=11, max_tokens=14, ignore_eos=True, logprobs=2, prompt_logprobs=1, presence_penalty=0.5)
#: Named, so that the parts of a test's plugin object are no candidates.
USED = {"device": "cpu", "attention": "torch", "ops": "torch", "sampler": "torch", "executor": "local"}
ALL = {"attention": "torch", "ops": "torch", "sampler": "torch", "every": 1}


class Offer:
    """A plugin object with the given parts."""

    def __init__(self, **factories: type) -> None:
        self._factories = factories

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [
            Part(role=role, name=f"odd-{role}", factory=factory, summary="for a test")
            for role, factory in self._factories.items()
        ]


class OddAttention(TorchAttention):
    """Wrong by 1e-3 where a step has one query a row."""

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        out = super().forward(*arguments, **named)
        return out + 1e-3 if arguments[4].rows.bounds.max_query == 1 else out


class OddOps(TorchOps):
    """Writes other keys than it returns."""

    def rope_write(self, qkv: Any, heads: Any, positions: Any, rope: Any, cache: Any, write_index: Any, *norms: Any):  # type: ignore[no-untyped-def]
        found = super().rope_write(qkv, heads, positions, rope, cache, write_index, *norms)
        cache.tensors["k"].flatten(0, 1)[write_index] *= 1.01
        return found


class OddSampler(TorchSampler):
    """Another token at every odd position, and no log-probabilities."""

    def sample(self, logits: torch.Tensor, rows: Any) -> SampleOutput:
        odd = (rows.positions % 2 == 1)[:, None]
        return SampleOutput(ids=super().sample(torch.where(odd, -logits, logits), rows).ids)


class Failing(TorchAttention):
    calls = 0

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        Failing.calls += 1
        raise RuntimeError("the reference is ill")


def of(engine: Any, part: str) -> ShadowStats:
    return next(found for found in engine.stats().shadow if found.part == part)


def ids(engine: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(prompts, NOISE)]


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> list[Any]:
    from pegboard import Engine

    with Engine(tiny_path, **USED) as engine:
        assert engine.stats().shadow == ()
        return [(o.token_ids, o.completions[0].logprobs, o.prompt_logprobs) for o in engine.generate(PROMPTS, NOISE)]


@pytest.mark.supports("Engine", "shadow mode: parts beside their references on live traffic")
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("every", [1, 3])
def test_equal_parts_agree_and_the_outputs_are_those_without(
    tiny_path: Path, make_engine: Callable[..., Any], plain: list[Any], every: int, run_ahead: int
) -> None:
    engine = make_engine(tiny_path, **USED, shadow=ALL | {"every": every}, run_ahead=run_ahead)
    found = [(o.token_ids, o.completions[0].logprobs, o.prompt_logprobs) for o in engine.generate(PROMPTS, NOISE)]
    assert found == plain
    stats = {part.part: part for part in engine.stats().shadow}
    assert set(stats) == {"attention", "decode_attention", "ops", "sampler"}
    for part in stats.values():
        assert (part.differing, part.failed, part.max_abs, part.first) == (0, 0, 0.0, "")
        assert part.compared > 0
    for part in ("attention", "decode_attention"):
        assert stats[part].compared == 3 * stats[part].steps, "three layers"


@pytest.mark.parametrize(("every", "steps"), [(1, 13), (3, 4), (20, 0)])
def test_how_often(tiny_path: Path, make_engine: Callable[..., Any], every: int, steps: int) -> None:
    """14 tokens: one by the prefill step, then 13 decode steps: 2 to 14."""
    engine = make_engine(tiny_path, **USED, shadow={"attention": "torch", "every": every})
    ids(engine, PROMPTS[:1])
    assert of(engine, "attention").steps == 1
    assert of(engine, "decode_attention").steps == steps


def test_every_difference_is_found_counted_logged_and_told(
    tiny_path: Path, make_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    events: list[StepDone] = []

    class Watch:
        @hookimpl
        def pegboard_step_done(self, event: StepDone) -> None:
            events.append(event)

    with caplog.at_level(logging.WARNING, logger="pegboard"):
        engine = make_engine(
            tiny_path,
            **USED,
            plugins=[Offer(attention=OddAttention)],
            decode_attention="odd-attention",
            shadow={"attention": "torch", "every": 2},
            watchers=[Watch()],
        )
        ids(engine, PROMPTS[:1])
        engine.close()
    prefill, decode = of(engine, "attention"), of(engine, "decode_attention")
    assert (prefill.steps, prefill.compared, prefill.differing) == (1, 3, 0)
    assert (decode.steps, decode.compared, decode.differing) == (6, 18, 18)
    assert decode.max_abs == pytest.approx(1e-3, rel=1e-3)
    assert 1 < decode.worst <= 50
    assert decode.first == "step 3, layer 0"
    assert decode.reference == "torch"
    told = [check for event in events for check in event.shadow if check.part == "decode_attention"]
    assert [check.differing for check in told] == [3] * 6
    assert {event.step for event in events if event.shadow} == {1, 3, 5, 7, 9, 11, 13}
    messages = [record.getMessage() for record in caplog.records if "shadow mode" in record.getMessage()]
    assert "decode_attention differs from torch in 3 of 3 results" in messages[0]
    assert len(messages) < 6, "logged when their number doubles"


def test_a_wrong_reference_changes_nothing_that_is_used(
    tiny_path: Path, make_engine: Callable[..., Any], plain: list[Any]
) -> None:
    odd = Offer(attention=OddAttention, ops=OddOps, sampler=OddSampler)
    shadow = {role: f"odd-{role}" for role in ("attention", "ops", "sampler")} | {"every": 1}
    engine = make_engine(tiny_path, **USED, plugins=[odd], shadow=shadow)
    assert ids(engine) == [tokens for tokens, _, _ in plain]
    assert of(engine, "decode_attention").differing == of(engine, "decode_attention").compared > 0
    written = of(engine, "ops")
    assert written.first == "step 1, rope_write, layer 0, cached k"
    assert written.differing == 3 * written.steps
    # Positions of the chosen tokens: prompt length and on
    odd_positions = sum((len(prompt) + i) % 2 for prompt in PROMPTS for i in range(14))
    sampler = of(engine, "sampler")
    assert sampler.differing == odd_positions
    assert sampler.worst == math.inf


def test_a_reference_that_raises_is_counted_and_the_request_goes_on(
    tiny_path: Path, make_engine: Callable[..., Any], plain: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    Failing.calls = 0
    shadow = {"attention": "odd-attention", "every": 5}
    engine = make_engine(tiny_path, **USED, plugins=[Offer(attention=Failing)], shadow=shadow)
    assert ids(engine, PROMPTS[:1]) == [plain[0][0]]
    decode = of(engine, "decode_attention")
    assert (decode.steps, decode.failed, decode.compared) == (2, 2, 0)
    assert Failing.calls == 3, "once a step: the other layers are spared"
    assert "the reference is ill" in caplog.text


def test_the_reference_sampler_is_right_again_after_a_difference(
    tiny_path: Path, make_engine: Callable[..., Any]
) -> None:
    """The used sampler is the odd one: with penalties, the reference must count the tokens that were really chosen."""
    engine = make_engine(
        tiny_path,
        device="cpu",
        plugins=[Offer(sampler=OddSampler)],
        sampler="odd-sampler",
        shadow={"sampler": "torch", "every": 1},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=3.0)
    [output] = engine.generate([[4, 4, 9]], sampling)
    stats = of(engine, "sampler")
    assert len(output.token_ids) == stats.compared == 20
    assert stats.differing == 10, "at odd positions and nowhere else"


def test_the_tolerance_can_be_set(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {"plugins": [Offer(attention=OddAttention)], "attention": "odd-attention"}
    engine = make_engine(tiny_path, **USED | settings, shadow={"attention": "torch", "tolerance": 0.01})
    ids(engine)
    assert of(engine, "decode_attention").differing == 0
    assert of(engine, "decode_attention").max_abs > 5e-4


def test_without_shadow_the_runner_has_the_parts_themselves(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_path, **USED)
    executor = engine._phases.executor
    assert type(executor) is LocalExecutor
    runner = executor._runner
    assert type(runner) is ModelRunner
    assert {type(runner.parts.prefill), type(runner.parts.ops), type(runner.parts.sampler)} == {
        TorchAttention,
        TorchOps,
        TorchSampler,
    }


def test_with_preemption_chunks_and_reused_slots(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    """Slots change hands and are opened again in the middle of a text; the reference's history follows."""
    page = 16 * 2 * 2 * 16 * 4 * 3  # entries, K and V, KV heads, head size, bytes, layers
    engine = make_engine(
        tiny_path,
        **USED,
        shadow=ALL,
        max_rows=3,
        max_length=96,
        kv_memory=12 * page,
        scheduler={"use": "continuous", "options": {"chunk": 7}},
        run_ahead=1,
    )
    prompts = [[3 + i, *range(5, 20 + 2 * i)] for i in range(9)]
    sampling = SamplingParams(seed=4, max_tokens=40, ignore_eos=True, repetition_penalty=1.3, min_tokens=5, top_p=0.9)
    outputs = engine.generate(prompts, sampling)
    assert [len(output.token_ids) for output in outputs] == [40] * 9
    stats = engine.stats()
    assert stats.preemptions_total > 0
    for part in stats.shadow:
        assert (part.differing, part.failed) == (0, 0), part
    assert of(engine, "sampler").compared >= 9 * 40


# -- refusals


class Elsewhere(LocalExecutor):
    shadows = False


class OtherLayout(TorchAttention):
    @classmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Any) -> Sequence[KVLayout]:
        return [KVLayout(name="mine", tensors=())]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"shadow": {"every": 3}}, "names nothing to compare with: give one of attention, ops, sampler"),
        ({"shadow": {"attention": "auto"}}, "must be named"),
        ({"shadow": {"atention": "torch"}}, "did you mean 'attention'?"),
        ({"shadow": {"attention": "torch", "every": 0}}, "shadow.every"),
        ({"shadow": {"attention": "torch", "tolerance": 0}}, "shadow.tolerance"),
        ({"shadow": {"attention": "torsch"}}, "shadow.attention = 'torsch'"),
        ({"shadow": ALL, "executor": "odd-executor"}, "executor = 'odd-executor' does not run parts beside others"),
        ({"shadow": {"attention": "odd-attention"}}, "'odd-attention' does not know the KV layout nhd"),
    ],
)
def test_what_cannot_work_is_refused(tiny_path: Path, make_engine: Any, settings: Any, reason: str) -> None:
    plugin = Offer(executor=Elsewhere, attention=OtherLayout)
    with pytest.raises(ConfigError) as caught:
        make_engine(tiny_path, **USED | settings, plugins=[plugin])
    assert reason in str(caught.value)


def test_a_reference_takes_options_and_overrides() -> None:
    config = load_config({"model": "m", "shadow": {"attention": "torch"}}, ["shadow.attention.options.a=1"])
    assert config.shadow is not None
    assert config.shadow.references()["attention"].options == {"a": 1}
    assert ("shadow.attention", "attention") in [(where, role) for where, role, _ in config.choices()]


# -- the wrapped sampler by itself


def test_verified_drafts_are_compared_and_remembered() -> None:
    from pegboard.contracts.device import DeviceFacts
    from pegboard.contracts.sampler import SamplerNeed

    device = DeviceFacts(type="cpu", index=0, name="", total_bytes=1, free_bytes=1)
    need = SamplerNeed(device=device, vocab_size=20, slots=2, max_length=64, max_drafts=2)
    log = ShadowLog(None)
    sampler = BesideSampler(TorchSampler(need), TorchSampler(need), log)
    greedy = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    sampler.open([SlotOpening(slot=1, sampling=greedy, seed=1, prompt=(3,), max_length=60)])
    generator = torch.Generator().manual_seed(0)
    compared = 0
    for position in range(1, 31, 3):
        rows = VerifyRows(
            slots=torch.tensor([1]),
            query_start=torch.tensor([0, 3], dtype=torch.int32),
            positions=torch.tensor([position]),
            ids=torch.tensor([0, 5, 6]),
            parents=None,
            probs=None,
            host_slots=(1,),
        )
        if position % 2:
            log.begin()
        sampler.verify(torch.randn(3, 20, generator=generator), rows)
        if position % 2:
            [check] = log.end().checks()
            assert (check.part, check.compared, check.differing, check.error) == ("sampler", 1, 0, None)
            compared += 1
    assert compared == 5
