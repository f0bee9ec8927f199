"""Logits processors through an engine: who asks gets them, nobody else feels them, one that raises hurts its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from pegboard import ConfigError, Engine, InvalidRequest, Part, PluginError, SamplingParams, hookimpl
from pegboard.contracts.processor import LogitsProcessor, ProcessorNeed, ProcessorOpening, ProcessRows
from pegboard.plan import AssemblyPlan
from pegboard.runner.local import LocalExecutor
from pegboard.survey import Survey
from pegboard.testing import isolated_engine

PROMPT = [5, 9, 13, 40, 77]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Ids(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ids: list[int]


class Watched(LogitsProcessor):
    """Counts every call, over all instances."""

    calls: ClassVar[list[str]] = []

    def __init__(self, need: ProcessorNeed) -> None:
        self.need = need

    @classmethod
    def refusals(cls, need: ProcessorNeed, options: Any) -> Sequence[str]:
        return []

    @classmethod
    def create(cls, need: ProcessorNeed, options: Any) -> Self:
        return cls(need)

    def open(self, opening: ProcessorOpening) -> None:
        self.calls.append("open")

    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        self.calls.append("process")


class Only(Watched):
    """Nothing but these ids; runs ahead."""

    arguments = Ids

    def __init__(self, need: ProcessorNeed) -> None:
        super().__init__(need)
        self.ids: dict[int, list[int]] = {}

    def check(self, arguments: Ids, sampling: SamplingParams) -> None:
        if max(arguments.ids) >= self.need.vocab_size:
            raise InvalidRequest(f"there is no token {max(arguments.ids)}")

    def open(self, opening: ProcessorOpening) -> None:
        super().open(opening)
        assert isinstance(opening.arguments, Ids)
        self.ids[opening.slot] = opening.arguments.ids

    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        super().process(logits, rows)
        for row, slot in zip(logits, rows.slots, strict=True):
            kept = row[self.ids[slot]].clone()
            row.fill_(-torch.inf)
            row[self.ids[slot]] = kept


class Counting(Watched):
    """The ids that follow the last: prompt or chosen token + 1. Needs to know it."""

    needs_host_token = True

    def __init__(self, need: ProcessorNeed) -> None:
        super().__init__(need)
        self.texts: dict[int, list[int]] = {}

    def open(self, opening: ProcessorOpening) -> None:
        super().open(opening)
        self.texts[opening.slot] = [*opening.prompt, *opening.output]

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        self.calls.append("accept")
        self.texts[slot] += tokens

    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        super().process(logits, rows)
        for row, slot in zip(logits, rows.slots, strict=True):
            row.fill_(-torch.inf)
            row[self.texts[slot][-1] + 1] = 0.0


class Cycling(Counting):
    """After 10 + i either 10 + (i + 1) % 6 or, in a fifth of all places, 17 or 18, which lead back to 10."""

    takes_drafts = True

    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        self.calls.append("process with drafts" if rows.drafts else "process")
        row = 0
        for place, slot in enumerate(rows.slots):
            text, drafts = self.texts[slot], rows.drafts_of(place)
            for count in range(len(drafts) + 1):
                kept = logits[row].clone()
                logits[row].fill_(-torch.inf)
                allowed = self.after([*text, *drafts[:count]])
                logits[row, allowed] = kept[allowed]
                row += 1
        assert row == len(logits), "1 + drafts rows a slot"

    @staticmethod
    def after(text: Sequence[int]) -> list[int]:
        if not 10 <= text[-1] < 16:
            return [10]
        return [17, 18] if len(text) % 5 == 3 else [10 + (text[-1] - 9) % 6]


class Fragile(Counting):
    """Spoils its logits and raises at token 80, wherever it stands in the batch."""

    def process(self, logits: Tensor, rows: ProcessRows) -> None:
        super().process(logits, rows)
        if any(self.texts[slot][-1] == 80 for slot in rows.slots):
            logits.fill_(torch.nan)
            raise RuntimeError("80 is too much")


class Gives(Watched):
    """As processors of other libraries do."""

    def process(self, logits: Tensor, rows: ProcessRows) -> Tensor:  # type: ignore[override]
        return logits * 0


class AheadExecutor(LocalExecutor):
    """Rows run as wide as they were planned, as on a device that the host does not wait for."""

    @classmethod
    def _watched(cls, runner: Any, survey: Any) -> Any:
        if runner._stepping.drafting is not None:
            runner._stepping.drafting.ahead = True
        return runner


class Plugin:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        factories = {"only": Only, "counting": Counting, "fragile": Fragile, "cycling": Cycling, "gives": Gives}
        return [
            Part(role="executor", name="ahead", factory=AheadExecutor, summary="of this test"),
            *(
                Part(role="logits_processor", name=name, factory=factory, summary="of this test")
                for name, factory in factories.items()
            ),
        ]


ALL: dict[str, Any] = {"plugins": [Plugin()], "logits_processors": ["only", "counting", "fragile", "cycling", "gives"]}


@pytest.fixture(params=[0, 2], ids="depth {}".format)
def engine(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[Engine]:
    with isolated_engine(tiny_path, max_rows=8, run_ahead=request.param, **ALL) as engine:
        Watched.calls.clear()
        yield engine


def with_processors(**processors: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, processors=processors)


@pytest.mark.supports("Sampling", "logits processors of third parties, by request, beside others")
def test_each_request_gets_its_own(engine: Engine) -> None:
    plain = engine.generate([PROMPT], GREEDY)[0].token_ids
    assert Watched.calls == []  # nobody asked, nobody was called
    asked = [
        GREEDY,
        with_processors(only={"ids": [7, 8]}),
        with_processors(counting={}),
        with_processors(only={"ids": [9]}),
        GREEDY,
    ]
    handles = [engine.submit(PROMPT, sampling) for sampling in asked]
    found = [handle.result(timeout=60).raise_for_error().token_ids for handle in handles]
    assert found[0] == found[4] == plain
    assert set(found[1]) <= {7, 8}
    assert found[2] == tuple(range(78, 86))
    assert set(found[3]) == {9}


def test_preempted_requests_go_on(tiny_path: Path) -> None:
    page = 16 * 2 * 2 * 16 * 4 * 3
    with isolated_engine(tiny_path, max_rows=8, max_length=48, kv_memory=5 * page, run_ahead=1, **ALL) as engine:
        long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, processors={"counting": {}})
        outputs = [engine.submit([start], long) for start in (10, 50, 90, 130)]
        for start, handle in zip((10, 50, 90, 130), outputs, strict=True):
            assert handle.result(timeout=60).token_ids == tuple(range(start + 1, start + 31))
        assert engine.stats().preemptions_total > 0


def test_log_probabilities_are_the_models_own(engine: Engine) -> None:
    """Raw ones from before the processors, processed ones from after them."""
    sampling = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "logprobs": 2}
    only = {"only": {"ids": [7]}}
    beside = engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=4))
    raw = engine.generate([PROMPT], SamplingParams(processors=only, **sampling))[0].completions[0].logprobs
    right = engine.generate([PROMPT], SamplingParams(logit_bias={7: 1e4}, **sampling))[0].completions[0].logprobs
    for found, expected in zip(raw, right, strict=True):
        assert found.token_id == expected.token_id == 7
        assert [id for id, _ in found.top] == [id for id, _ in expected.top]
        assert (found.logprob, found.top[0][1]) == pytest.approx((expected.logprob, expected.top[0][1]), abs=1e-4)
    processed = SamplingParams(processors=only, logprobs_mode="processed", **sampling)
    assert [r.logprob for r in engine.generate([PROMPT], processed)[0].completions[0].logprobs] == [0.0] * 3
    assert len(beside.result().completions[0].logprobs[0].top) == 4


@pytest.mark.supports("Sampling", "logits processors beside requests that speculate")
@pytest.mark.parametrize("depth", [0, 2])
def test_beside_drafts_and_beams(tiny_path: Path, depth: int) -> None:
    """Who has a processor, or beams, has no drafts; whose neighbour has one gets the tokens and numbers of always."""
    copied = [11, 12, 13, 14, 15, 16] * 4
    scored = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    asked: list[tuple[list[int], SamplingParams]] = [
        (copied, SamplingParams(**scored)),
        (PROMPT, SamplingParams(processors={"only": {"ids": [7, 8]}}, **scored)),
        (copied[1:], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)),
        (PROMPT, SamplingParams(processors={"counting": {}}, **scored)),
        (PROMPT, SamplingParams(temperature=0.0, max_tokens=8, num_beams=2, ignore_eos=True)),
        (copied[2:], SamplingParams(temperature=0.8, seed=4, max_tokens=24, ignore_eos=True)),
    ]
    found: list[list[Any]] = []
    for speculator in (None, "ngram"):
        with isolated_engine(
            tiny_path, dtype="float64", max_rows=8, run_ahead=depth, speculator=speculator, **ALL
        ) as engine:
            handles = [engine.submit(*one) for one in asked]
            outputs = [handle.result(timeout=60).raise_for_error() for handle in handles]
            found.append([output.token_ids for output in outputs])
            records = [r for output in outputs for r in output.completions[0].logprobs or ()]
            found.append([value for r in records for value in (r.logprob, *(logprob for _, logprob in r.top))])
            if speculator is not None:
                assert engine.stats().speculation is not None
    assert found[0] == found[2]
    assert found[1] == pytest.approx(found[3], abs=1e-9)
    assert len(found[1]) == 3 * 3 * 8


@pytest.mark.supports("Sampling", "logits processors and drafts in one request")
@pytest.mark.parametrize(
    ("depth", "settings"),
    [
        pytest.param(0, {}, id="0-roomy"),
        pytest.param(2, {}, id="2-roomy", marks=pytest.mark.full),
        pytest.param(0, {"kv_memory": 300_000, "max_length": 128}, id="0-tight", marks=pytest.mark.full),
        pytest.param(2, {"kv_memory": 300_000, "max_length": 128}, id="2-tight"),
        pytest.param(0, {"executor": "ahead"}, id="0-drafts stay on the device", marks=pytest.mark.full),
        pytest.param(2, {"executor": "ahead"}, id="2-drafts stay on the device"),
    ],
)
def test_with_drafts_of_its_own(tiny_path: Path, depth: int, settings: dict[str, Any]) -> None:
    """Tokens and the model's own log-probabilities are those without a speculator, whatever becomes of drafts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "seed": 1, "logprobs": 1, "logprobs_mode": "processed"},
        {"temperature": 1.0, "seed": 2, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 3, "n": 2, "logprobs": 0},
    ]
    asked = [
        SamplingParams(**{"max_tokens": 60 + number, "ignore_eos": True, "processors": {"cycling": {}}} | kind)
        for number, kind in enumerate(kinds)
    ]
    found: list[list[Any]] = []
    for speculator in (None, "ngram"):
        Watched.calls.clear()
        with isolated_engine(
            tiny_path,
            dtype="float64",
            max_rows=4,
            run_ahead=depth,
            speculator=speculator,
            adapt_drafts=False,
            **ALL,
            **settings,
        ) as engine:
            handles = [engine.submit(PROMPT, one) for one in asked]
            outputs = [handle.result(timeout=60).raise_for_error() for handle in handles]
            stats = engine.stats().speculation
        found.append([c.token_ids for output in outputs for c in output.completions])
        records = [r for output in outputs for c in output.completions for r in c.logprobs or ()]
        found.append([value for r in records for value in (r.logprob, *(logprob for _, logprob in r.top))])
    assert found[0] == found[2]
    assert found[1] == pytest.approx(found[3], abs=1e-9)
    for ids in found[0]:
        assert all(ids[at] in Cycling.after([*PROMPT, *ids[:at]]) for at in range(len(ids)))
    assert "process with drafts" in Watched.calls
    assert stats is not None
    assert sum(stats.accepted) > 60


@pytest.mark.supports("Sampling", "a logits processor that raises fails its own request only")
def test_one_that_raises_fails_its_request_only(engine: Engine) -> None:
    plain = engine.generate([PROMPT], GREEDY)[0].token_ids
    fragile = with_processors(fragile={})
    handles = [engine.submit(*asked) for asked in ((PROMPT, fragile), ([10], fragile), (PROMPT, GREEDY))]
    broken, fine, other = (handle.result(timeout=60) for handle in handles)
    assert broken.error == "logits processor fragile failed: RuntimeError: 80 is too much"
    assert broken.token_ids == (78, 79, 80)
    assert fine.token_ids == tuple(range(11, 19))
    assert other.token_ids == plain
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == plain


def test_one_that_gives_a_result_is_told(engine: Engine) -> None:
    [output] = engine.generate([PROMPT], with_processors(gives={}))
    assert output.error is not None
    assert "gives failed: process gave a result, must change its logits in place" in output.error


def test_only_who_needs_tokens_waits_for_them(tiny_path: Path) -> None:
    """At depth 2 a request without such a processor has rows in flight that the host does not know yet."""
    with isolated_engine(tiny_path, max_rows=8, run_ahead=2, **ALL) as engine:
        scheduler = engine._phases.scheduler
        depths: dict[str, int] = {}
        schedule = scheduler.schedule

        def watched() -> Any:
            plan = schedule()
            for seq in scheduler.inner.ledger.running:
                depths[seq.id] = max(depths.get(seq.id, 0), seq.flying)
            return plan

        scheduler.schedule = watched
        asked = [with_processors(counting={}), with_processors(only={"ids": [7]}), GREEDY]
        for handle in [engine.submit(PROMPT, sampling) for sampling in asked]:
            handle.result(timeout=60)
    assert [depths[f"{serial}/0"] for serial in (1, 2, 3)] == [1, 3, 3]


@pytest.mark.parametrize(
    ("processors", "reason"),
    [
        ({"onyl": {}}, "no logits processor 'onyl'; did you mean 'only'"),
        ({"only": {}}, r"processors.only.ids: required"),
        ({"only": {"ids": [1], "idz": 2}}, r"processors.only.idz: unknown key; did you mean 'ids'"),
        ({"only": {"ids": [999]}}, "processors.only: there is no token 999"),
        ({"counting": {"from": 3}}, "processors.counting takes no arguments, and was given from"),
        ({"only": [1]}, "must map names of logits processors to their arguments"),
        (["only"], "must map names of logits processors to their arguments"),
    ],
)
def test_what_can_not_be_is_refused(tiny_path: Path, processors: Any, reason: str) -> None:
    sampling = SamplingParams(processors=processors)
    with isolated_engine(tiny_path, **ALL) as engine:
        with pytest.raises(InvalidRequest, match=reason):
            engine.submit(PROMPT, sampling)
        with pytest.raises(InvalidRequest, match=reason):
            engine.check(sampling)


def test_an_engine_without_them_says_so(tiny_path: Path, make_engine: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequest, match="it has none: name it in the config's logits_processors"):
        make_engine(tiny_path, device="cpu").submit(PROMPT, with_processors(only={"ids": [1]}))


def test_configs(tiny_path: Path) -> None:
    for wrong, reason in (
        (["auto"], "logits processors must be named"),
        (["only", "only"], "only is listed twice"),
        (["unknown"], "unknown"),
    ):
        with (
            pytest.raises(ConfigError, match=reason),
            isolated_engine(tiny_path, plugins=[Plugin()], logits_processors=wrong),
        ):
            pass


@pytest.mark.parametrize("arguments", [dict, Ids(ids=[1])], ids=["dict", "an instance"])
def test_arguments_that_are_no_model_are_refused(
    tiny_path: Path, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Only, "arguments", arguments)
    with (
        pytest.raises(PluginError, match=r"logits processor 'only': arguments is .*, must be a pydantic model or None"),
        isolated_engine(tiny_path, plugins=[Plugin()], logits_processors=["only"]),
    ):
        pass


def test_an_executor_that_runs_none_is_refused_with_them(tiny_path: Path) -> None:
    class Plain(LocalExecutor):
        processes = False

    class Executors(Plugin):
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            return [*super().pegboard_parts(), Part(role="executor", name="plain", factory=Plain, summary="Of old")]

    with (
        pytest.raises(ConfigError, match="executor = 'plain' runs no logits processors"),
        isolated_engine(tiny_path, plugins=[Executors()], logits_processors=["only"], executor="plain"),
    ):
        pass


def test_the_plan_knows_them(tiny_path: Path) -> None:
    """What another process would make of it."""
    with isolated_engine(tiny_path, **ALL) as engine:
        plan = msgspec.json.decode(msgspec.json.encode(engine.plan), type=AssemblyPlan)
        survey = Survey.of_plan(plan, engine._discover([]))
        made = survey.make_processors()
        survey.checkpoint.close()
    assert [(name, type(processor)) for name, processor in made.items()] == [
        ("only", Only),
        ("counting", Counting),
        ("fragile", Fragile),
        ("cycling", Cycling),
        ("gives", Gives),
    ]
    need = made["only"].need
    assert (need.vocab_size, need.eos_ids, need.tokenizer_json) == (211, {2}, None)
