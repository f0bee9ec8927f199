"""Speculators that ask for the target's hidden states are told those that transformers has for the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor

from pegboard import ConfigError, Engine, SamplingParams
from pegboard.contracts.part import Part
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import (
    DraftContext,
    Drafts,
    DraftTarget,
    Speculator,
    SpeculatorNeed,
    SpeculatorSpec,
)
from pegboard.models.llama import Llama
from pegboard.runner import LocalExecutor
from pegboard.testing.tiny import tiny_model

DRAFTS, VOCABULARY, SIZE = 3, 211, 64


class Witness(Speculator):
    """Proposes what it knows of the answers, wrong now and then, and writes down what it is told of each slot."""

    hidden: ClassVar[Any] = "all"
    answers: ClassVar[list[tuple[int, ...]]] = []
    #: (text, place -> state) of every sequence that was opened.
    told: ClassVar[list[tuple[list[int], dict[int, Tensor]]]] = []
    ends: ClassVar[list[DraftTarget]] = []

    def __init__(self, need: SpeculatorNeed) -> None:
        self.slots: dict[int, tuple[list[int], dict[int, Tensor]]] = {}

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: Any) -> Sequence[str]:
        return []

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: Any) -> SpeculatorSpec:
        return SpeculatorSpec(drafts=DRAFTS, hidden=cls.hidden)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need)

    def attach(self, target: DraftTarget) -> None:
        assert self.hidden != "none"
        self.ends.append(target)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self.slots[opening.slot] = ([*opening.prompt, *opening.output], {})
            self.told.append(self.slots[opening.slot])

    def propose(self, context: DraftContext) -> Drafts:
        rows = []
        for slot in context.slots.tolist():
            text = tuple(self.slots.get(slot, ([0], {}))[0])
            known = next((answer for answer in self.answers if answer[: len(text)] == text), ())
            right = [*known[len(text) : len(text) + context.drafts], *[5] * context.drafts][: context.drafts]
            random = Random(str(text))
            rows.append([id if random.random() < 0.8 else (id + 1) % VOCABULARY for id in right])
        return Drafts(ids=torch.tensor(rows))

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        for slot, row, kept in zip(slots.tolist(), ids.tolist(), count.tolist(), strict=True):
            if slot in self.slots:
                self.slots[slot][0].extend(row[:kept])

    def observe_hidden(self, slots: Tensor, ids: Tensor, count: Tensor, hidden: Tensor) -> None:
        assert hidden.shape == (*ids.shape, SIZE)
        for slot, kept, states in zip(slots.tolist(), count.tolist(), hidden, strict=True):
            if slot in self.slots:
                text, places = self.slots[slot]
                for place in range(kept):
                    places[len(text) - kept + place - 1] = states[place].clone()

    def observe_prompt(self, slot: int, start: int, hidden: Tensor) -> None:
        assert self.hidden == "all"
        text, places = self.slots[slot]
        assert start + len(hidden) < len(text)
        for place, state in enumerate(hidden):
            assert start + place not in places
            places[start + place] = state.clone()


class Kept(Witness):
    hidden = "kept"


class Nosy(Witness):
    """Would fail if it were told anything."""

    hidden = "none"


class PaddedExecutor(LocalExecutor):
    """Rows run as wide as they were planned, and filled up, as on a device that the host does not wait for."""

    padded: ClassVar[int] = 0

    @classmethod
    def pads(cls, device: str) -> bool:
        return True

    @classmethod
    def _watched(cls, runner: Any, survey: Any) -> Any:
        if runner._stepping.drafting is not None:
            runner._stepping.drafting.ahead = True
        shape_of = runner._shape

        def shape(rows: Any) -> Any:
            found = shape_of(rows)
            cls.padded += found[1]
            return found

        runner._shape = shape
        return runner


def witnesses() -> list[Part]:
    made: dict[str, type] = {"all": Witness, "kept": Kept, "none": Nosy}
    return [Part(role="speculator", name=name, factory=part, summary="for tests") for name, part in made.items()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("states") / "model", vocab_size=VOCABULARY, tokenizer=False)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def prompts() -> list[list[int]]:
    """Of one token, shorter than the width of decode rows, and longer than a chunk; two begin alike."""
    random = Random(0)
    long = [random.randrange(3, VOCABULARY) for _ in range(50)]
    return [[9], [4, 5, 6], long, [*long[:40], 7, 8], [random.randrange(3, VOCABULARY) for _ in range(23)]]


def run(model: Path, plugin: object, **settings: Any) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    with Engine(model, device="cpu", dtype="float32", plugins=[plugin], adapt_drafts=False, **settings) as engine:
        made = engine.generate(prompts(), sampling)
    return [(*output.prompt_token_ids, *output.raise_for_error().token_ids) for output in made]


@pytest.mark.parametrize("name", ["all", "kept", "none"])
@pytest.mark.parametrize(("executor", "run_ahead"), [("local", 0), ("padding", 1)])
@pytest.mark.parametrize("chunk", [None, 9])
def test_states_are_those_of_the_text(
    model: Path, oracle: Any, padding: Callable[..., Any], name: str, executor: str, run_ahead: int, chunk: int | None
) -> None:
    plugin = padding(witnesses(), executor=PaddedExecutor)
    Witness.answers = run(model, plugin, executor="local")
    Witness.told.clear()
    settings: dict[str, Any] = {"max_rows": 4, "scheduler": {"use": "continuous", "options": {"chunk": chunk}}}
    if executor == "padding":
        settings |= {"ops": "padding", "attention": "padding"}
    PaddedExecutor.padded = 0
    found = run(model, plugin, speculator=name, executor=executor, run_ahead=run_ahead, **settings)
    assert (PaddedExecutor.padded > 0) == (executor == "padding")
    assert found == Witness.answers
    assert len(Witness.told) == len(found)
    for text, places in Witness.told:
        answer = next(answer for answer in found if text[: len(answer)] == list(answer) or list(answer) == text)
        prompt = len(answer) - 13
        wanted = {"all": range(len(answer) - 1), "kept": range(prompt - 1, len(answer) - 1), "none": range(0)}[name]
        if name == "all" and min(places) > 0:  # a prefix in the cache
            assert answer[:40] == found[2][:40]
            wanted = range(min(places), len(answer) - 1)
        assert set(wanted) <= set(places)
        assert (prompt - 2 in places) == (name == "all" and prompt > 1)
        if not places:
            continue
        with torch.inference_mode():
            states = oracle.model(torch.tensor([answer])).last_hidden_state[0]
        for place in wanted:
            torch.testing.assert_close(places[place], states[place], rtol=1e-3, atol=1e-3)


def test_the_ends_are_the_models_own(model: Path, oracle: Any, padding: Callable[..., Any]) -> None:
    run(model, padding(witnesses()), speculator="kept")
    target = Witness.ends[-1]
    ids = torch.tensor([3, 200, 7])
    with torch.inference_mode():
        torch.testing.assert_close(target.embed(ids), oracle.model.embed_tokens(ids))
        states = torch.randn(4, SIZE)
        torch.testing.assert_close(target.head(states), oracle.lm_head(states), rtol=1e-4, atol=1e-4)
    assert target.dtype == torch.float32


def test_a_model_that_shares_nothing_is_refused(
    model: Path, padding: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "plugins": [padding(witnesses())]}
    monkeypatch.setattr(Llama, "shares_ends", False)
    with pytest.raises(ConfigError, match="shares neither"):
        Engine(model, speculator="kept", **settings).close()
    Engine(model, speculator="none", **settings).close()
