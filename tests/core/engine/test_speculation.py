"""Speculation changes no token, whatever is proposed: the same requests with and without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor

from pegboard import Engine, PluginError, RequestOutput, SamplingParams
from pegboard.contracts.observer import StepDone
from pegboard.contracts.part import Part
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.scheduler import DraftReport
from pegboard.contracts.speculator import DraftContext, Drafts, Speculator, SpeculatorNeed, SpeculatorSpec
from pegboard.registry.hookspecs import hookimpl
from pegboard.request import Request
from pegboard.runner import LocalExecutor
from pegboard.testing.tiny import tiny_model

DRAFTS, VOCABULARY = 3, 211


class Proposer(Speculator):
    """Knows each slot's text, and proposes what `guess` says."""

    def __init__(self, need: SpeculatorNeed) -> None:
        self.texts: list[list[int]] = [[0] for _ in range(need.slots)]

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: Any) -> Sequence[str]:
        return []

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: Any) -> SpeculatorSpec:
        return SpeculatorSpec(drafts=DRAFTS)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self.texts[opening.slot] = [*opening.prompt, *opening.output]

    def propose(self, context: DraftContext) -> Drafts:
        rows = []
        for slot, last, position in zip(
            context.slots.tolist(), context.last_ids.tolist(), context.positions.tolist(), strict=True
        ):
            text = self.texts[slot]
            assert (text[-1], len(text) - 1) == (last, position), "the runner and the speculator tell two stories"
            found = self.guess(tuple(text))[: context.drafts]
            rows.append([*found, *[-1] * (context.drafts - len(found))])
        return Drafts(ids=torch.tensor(rows))

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        for slot, row, kept in zip(slots.tolist(), ids.tolist(), count.tolist(), strict=True):
            self.texts[slot] += row[:kept]

    def guess(self, text: tuple[int, ...]) -> list[int]:
        raise NotImplementedError


class Nonsense(Proposer):
    def guess(self, text: tuple[int, ...]) -> list[int]:
        return [Random(str(text)).randrange(VOCABULARY) for _ in range(DRAFTS)]


class Nothing(Proposer):
    def guess(self, text: tuple[int, ...]) -> list[int]:
        return []


class Gaps(Proposer):
    """A draft after a gap can't be verified, and is none."""

    def guess(self, text: tuple[int, ...]) -> list[int]:
        return [text[-1], -1, text[-1]]


class Oracle(Proposer):
    """Has read the answers, makes mistakes now and then, and goes on past every end."""

    answers: ClassVar[list[tuple[int, ...]]] = []

    def guess(self, text: tuple[int, ...]) -> list[int]:
        known = next((answer for answer in self.answers if answer[: len(text)] == text), ())
        right = [*known[len(text) : len(text) + DRAFTS], *[5] * DRAFTS][:DRAFTS]
        random = Random(str(text))
        return [id if random.random() < 0.8 else (id + 1) % VOCABULARY for id in right]


class Bush(Proposer):
    """Trees in which the right tokens, when it knows them, are the second child, the first, and the first again."""

    #: Queries: the last token is 0.
    parents: ClassVar[tuple[int, ...]] = (0, 0, 1, 2, 2, 4, 4)

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: Any) -> SpeculatorSpec:
        return SpeculatorSpec(drafts=len(cls.parents), depth=3)

    def guess(self, text: tuple[int, ...]) -> list[int]:
        known = next((answer for answer in Oracle.answers if answer[: len(text)] == text), ())
        first, second, third = [*known[len(text) : len(text) + 3], 5, 5, 5][:3]
        random = Random(str(text))

        def other(than: int) -> int:
            return (than + 1 + random.randrange(VOCABULARY - 1)) % VOCABULARY

        if random.random() < 0.2:
            second = other(second)
        return [other(first), first, random.randrange(VOCABULARY), second, other(second), third, other(third)]

    def propose(self, context: DraftContext) -> Drafts:
        ids = super().propose(context).ids
        return Drafts(ids=ids, parents=torch.tensor(self.parents[: ids.shape[1]]).expand_as(ids))


class AheadExecutor(LocalExecutor):
    """Rows run as wide as they were planned, as on a device that the host does not wait for."""

    @classmethod
    def _watched(cls, runner: Any, survey: Any) -> Any:
        runner._stepping.drafting.ahead = True
        return runner


class Parts:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        made: Mapping[str, type] = {
            "nonsense": Nonsense,
            "nothing": Nothing,
            "gaps": Gaps,
            "oracle": Oracle,
            "bush": Bush,
        }
        found = [Part(role="speculator", name=name, factory=part, summary="for tests") for name, part in made.items()]
        return [*found, Part(role="executor", name="ahead", factory=AheadExecutor, summary="for tests")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("speculation") / "model", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("speculation") / "draft", vocab_size=VOCABULARY, num_hidden_layers=1, tokenizer=False
    )


def requests() -> list[Request]:
    """Greedy and seeded, short and long, with a common beginning, penalties, all kinds of ends, log-probabilities."""
    common = [7, 8, 9, 10] * 8
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.9, "seed": 2, "top_p": 0.8, "presence_penalty": 0.5, "logprobs": 0},
        {"temperature": 1.0, "seed": 3, "top_k": 20, "stop": ("e", "th"), "min_tokens": 4},
        {"temperature": 0.7, "seed": 4, "stop_token_ids": tuple(range(20, 80)), "min_tokens": 6},
        {"temperature": 0.0, "logit_bias": {11: 3.0, 40: -2.0}, "logprobs": 1, "logprobs_mode": "processed"},
        {"temperature": 0.6, "seed": 5, "n": 2, "min_p": 0.05, "prompt_logprobs": 1},
    ]
    random = Random(0)
    found = []
    for index, kind in enumerate(kinds):
        own = [random.randrange(3, VOCABULARY) for _ in range(1 + 11 * index)]
        sampling = SamplingParams(max_tokens=3 + 4 * index, ignore_eos=True, **kind)
        found.append(Request(prompt=own + common if index % 2 else common + own, sampling=sampling))
    return found


def outputs(model: Path, again: bool = False, **settings: Any) -> list[RequestOutput]:
    """`again`: each twice, the second time the prompt's prefix is there."""
    settings = {"executor": "local", "adapt_drafts": False, **settings}
    with Engine(model, device="cpu", dtype="float32", max_rows=4, plugins=[Parts()], **settings) as engine:
        made = engine.generate(requests() * (1 + again))
        engine._phases.scheduler.check_integrity()
    return [output.raise_for_error() for output in made]


def same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        for mine, plain in zip(one.completions, other.completions, strict=True):
            assert mine.token_ids == plain.token_ids
            assert (mine.text, mine.finish_reason) == (plain.text, plain.finish_reason)
            assert _values(mine.logprobs) == pytest.approx(_values(plain.logprobs), abs=1e-3)
        assert _values(one.prompt_logprobs) == pytest.approx(_values(other.prompt_logprobs), abs=1e-3)


def _values(logprobs: Any) -> list[float]:
    return [value for record in logprobs or () for value in (record.logprob, *(v for _, v in record.top))]


@pytest.fixture(scope="module")
def plain(model: Path) -> list[RequestOutput]:
    made = outputs(model, again=True)
    Oracle.answers = [
        (*output.prompt_token_ids, *completion.token_ids) for output in made for completion in output.completions
    ]
    return made


ROOMY: dict[str, Any] = {}
#: Prompts in chunks, and pages for about two of the four rows.
TIGHT: dict[str, Any] = {
    "max_step_tokens": 24,
    "kv_memory": 180_000,
    "max_length": 160,
    "scheduler": {"use": "continuous", "options": {"chunk": 9}},
}


#: What the ordinary run drafts by each proposer, with much memory and with little: each way with each amount, and those
#: that are often right both behind and ahead of the host.
OFTEN: dict[str, list[tuple[str, int, str]]] = {
    "nonsense": [("local", 0, "roomy"), ("ahead", 1, "tight")],
    "nothing": [("ahead", 1, "roomy"), ("local", 2, "tight")],
    "gaps": [("local", 2, "roomy"), ("local", 0, "tight")],
    "oracle": [("local", 0, "roomy"), ("local", 2, "tight"), ("ahead", 1, "tight")],
    "bush": [("local", 2, "roomy"), ("local", 0, "tight"), ("ahead", 1, "tight")],
    "ngram": [("ahead", 1, "roomy"), ("local", 2, "tight")],
    "draft_model": [("local", 0, "roomy"), ("local", 2, "tight"), ("ahead", 1, "tight")],
}
WAYS = [(*way, memory) for way in (("local", 0), ("local", 2), ("ahead", 1)) for memory in ("roomy", "tight")]


@pytest.mark.supports("Decoding", "speculative decoding, verified with shared noise: the same tokens as without")
@pytest.mark.parametrize(
    ("name", "executor", "run_ahead", "memory"),
    [pytest.param(n, *way, marks=() if way in OFTEN[n] else pytest.mark.full) for n in OFTEN for way in WAYS],
)
def test_the_same_tokens_as_without(
    model: Path,
    drafter: Path,
    plain: list[RequestOutput],
    name: str,
    executor: str,
    run_ahead: int,
    memory: str,
) -> None:
    settings = TIGHT if memory == "tight" else ROOMY
    options = {"model": str(drafter), "drafts": 2} if name == "draft_model" else {}
    speculator = {"use": name, "options": options}
    found = outputs(
        model, speculator=speculator, executor=executor, run_ahead=run_ahead, again=bool(settings), **settings
    )
    same(found, plain[: len(found)])
    preempted = sum(c.metrics.preemptions for output in found for c in output.completions)
    assert (preempted > 0) == bool(settings)


@pytest.mark.supports("Decoding", "speculative decoding with trained heads (Medusa, EAGLE), the same tokens as without")
@pytest.mark.parametrize(
    ("name", "executor", "run_ahead", "settings"),
    [
        pytest.param("medusa", "local", 0, ROOMY, id="medusa-local"),
        pytest.param("medusa", "local", 2, TIGHT, id="medusa-tight"),
        pytest.param("medusa", "ahead", 1, TIGHT, id="medusa-ahead", marks=pytest.mark.full),
        pytest.param("medusa tree", "local", 0, ROOMY, id="medusa tree-local"),
        pytest.param("medusa tree", "local", 2, TIGHT, id="medusa tree-tight", marks=pytest.mark.full),
        pytest.param("medusa tree", "ahead", 1, TIGHT, id="medusa tree-ahead"),
        pytest.param("eagle", "local", 0, ROOMY, id="eagle-local", marks=pytest.mark.full),
        pytest.param("eagle", "local", 2, TIGHT, id="eagle-tight"),
        pytest.param("eagle", "ahead", 1, TIGHT, id="eagle-ahead"),
    ],
)
def test_heads_give_the_same_tokens(
    model: Path,
    heads: dict[str, Path],
    plain: list[RequestOutput],
    name: str,
    executor: str,
    run_ahead: int,
    settings: dict[str, Any],
) -> None:
    kind, *tree = name.split()
    options = {"model": str(heads[kind])} | ({"choices": [[0], [0, 0], [1], [0, 1], [1, 0], [2]]} if tree else {})
    speculator = {"use": kind, "options": options}
    found = outputs(
        model, speculator=speculator, executor=executor, run_ahead=run_ahead, again=bool(settings), **settings
    )
    same(found, plain[: len(found)])


def test_observers_and_stats_tell_what_became_of_drafts(model: Path, plain: list[RequestOutput]) -> None:
    """The same by step and in all, with k adapted; what was accepted are tokens."""
    told: list[DraftReport] = []

    class Watcher:
        @hookimpl
        def pegboard_step_done(self, event: StepDone) -> None:
            if event.drafts is not None:
                told.append(event.drafts)

    with Engine(model, device="cpu", plugins=[Parts()], speculator="oracle", watchers=[Watcher()]) as engine:
        found = engine.generate(requests())
        stats = engine.stats().speculation
    same(found, plain[: len(found)])
    assert stats is not None
    for name in ("proposed", "accepted"):
        by_step = [sum(places) for places in zip_longest(*(getattr(report, name) for report in told), fillvalue=0)]
        assert getattr(stats, name) == tuple(by_step)
    assert stats.steps == sum(bool(report.proposed) for report in told)
    assert list(stats.proposed) == sorted(stats.proposed, reverse=True)
    assert all(right <= there for right, there in zip(stats.accepted, stats.proposed, strict=True))
    assert sum(stats.accepted) < sum(len(c.token_ids) for output in found for c in output.completions)
    assert stats.acceptance[0] > 0.5
    assert stats.mean_length is not None
    assert stats.mean_length > 1.5


@pytest.mark.supports("Decoding", "trees of drafts, the same tokens as without")
def test_paths_through_trees_are_kept(model: Path, plain: list[RequestOutput]) -> None:
    """Counts are by place along the path; acceptance is what the proposer knows, so paths have gaps to close."""
    with Engine(model, device="cpu", plugins=[Parts()], speculator="bush", adapt_drafts=False) as engine:
        found = engine.generate(requests())
        stats = engine.stats().speculation
    same(found, plain[: len(found)])
    assert stats is not None
    assert len(stats.proposed) == len(stats.accepted) == 3
    assert stats.acceptance[0] > 0.7
    assert stats.acceptance[2] > 0.4
    assert (stats.mean_length or 0) > 2.5


@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_trees_beside_windows_and_eight_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A model with windows shorter than its texts."""
    windows = {"architecture": "gemma3_text", "head_dim": 16, "sliding_window": 20}
    path = tiny_model(tmp_path / "m", vocab_size=VOCABULARY, std=0.4, **windows)
    before, settings = Oracle.answers, {**settings, "kv_memory": 400_000}
    try:
        expected = outputs(path, **settings)
        Oracle.answers = [(*o.prompt_token_ids, *c.token_ids) for o in expected for c in o.completions]
        same(outputs(path, speculator="bush", executor="ahead", run_ahead=1, **settings), expected)
        same(outputs(path, speculator="bush", **settings), expected)
    finally:
        Oracle.answers = before


class Tree(Nonsense):
    def propose(self, context: DraftContext) -> Drafts:
        found = super().propose(context).ids
        return Drafts(ids=found, parents=torch.zeros_like(found))


class RowTwice(Nonsense):
    def propose(self, context: DraftContext) -> Drafts:
        found = super().propose(context).ids
        return Drafts(ids=torch.cat((found, found)))


@pytest.mark.parametrize(("part", "word"), [(Tree, "tree"), (RowTwice, "must be int64 [1, drafts]")])
def test_proposals_that_break_the_contract_fail_their_requests(model: Path, part: type, word: str) -> None:
    class Broken:
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            return [Part(role="speculator", name="broken", factory=part, summary="for tests")]

    with Engine(model, device="cpu", plugins=[Broken()], speculator="broken") as engine:
        output = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0]
        assert output.error is not None
        assert PluginError.__name__ in output.error
        assert word in output.error
