"""A speculator that passes its suite (n-grams, on the host), and broken ones that each fail the test of their rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Self

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import (
    DraftContext,
    Drafts,
    HeadText,
    HeadTrainer,
    HeadTraining,
    Speculator,
    SpeculatorNeed,
    SpeculatorSpec,
)
from pegboard.testing.conformance import run_suite
from pegboard.testing.speculator import TARGET, SpeculatorSuite

DRAFTS = 4


def continuation(history: Sequence[int], drafts: int) -> list[int]:
    """What followed the last two tokens when they last came together."""
    for start in range(len(history) - 3, -1, -1):
        if list(history[start : start + 2]) == list(history[-2:]):
            return list(history[start + 2 : start + 2 + drafts])
    return []


class NGram(Speculator):
    needs_host_token = True

    def __init__(self, need: SpeculatorNeed) -> None:
        self.histories: list[list[int]] = [[] for _ in range(need.slots)]
        self.need = need

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: Any) -> Sequence[str]:
        if need.target.vocab_size > 1000:
            return [f"a vocabulary of {need.target.vocab_size} tokens is more than the 1000 that it can count"]
        return []

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: Any) -> SpeculatorSpec:
        return SpeculatorSpec(drafts=DRAFTS)

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls(need)

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self.histories[opening.slot] = [*opening.prompt, *opening.output]

    def propose(self, context: DraftContext) -> Drafts:
        rows = [continuation(self.histories[slot], context.drafts) for slot in context.slots.tolist()]
        ids = torch.tensor([row + [-1] * (context.drafts - len(row)) for row in rows])
        probs = None
        if self.need.wants_probs:
            probs = torch.nn.functional.one_hot(ids.clamp(min=0), self.need.target.vocab_size).float()
        return Drafts(ids=ids, probs=probs)

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        for slot, row, kept in zip(slots.tolist(), ids.tolist(), count.tolist(), strict=True):
            self.histories[slot] += row[:kept]


class NGramSuite(SpeculatorSuite):
    part = NGram
    claims = ("probs",)
    foreign = (("vocabulary", replace(TARGET, vocab_size=5000)),)

    def reference(self, history: Sequence[int], drafts: int) -> Sequence[int]:
        """By regular counting, forwards."""
        found: Sequence[int] = []
        for place in range(2, len(history)):
            if history[place - 2] == history[-2] and history[place - 1] == history[-1]:
                found = history[place : place + drafts]
        return found


class TestNGram(NGramSuite):
    """A suite of a suite: it runs here as it does in a plugin's own tests."""


class Fickle(NGram):
    """Says another number of drafts each time."""

    calls = 0

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: Any) -> SpeculatorSpec:
        Fickle.calls += 1
        return SpeculatorSpec(drafts=DRAFTS, weight_bytes=Fickle.calls)


class Hospitable(NGram):
    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: Any) -> Sequence[str]:
        return []


class Confused(NGram):
    capturable = True


class Overshoots(NGram):
    """More drafts than are wanted."""

    def propose(self, context: DraftContext) -> Drafts:
        return super().propose(replace(context, drafts=DRAFTS))


class LeavesVocabulary(NGram):
    def propose(self, context: DraftContext) -> Drafts:
        drafts = super().propose(context)
        return replace(drafts, ids=drafts.ids.where(drafts.ids != 7, 64))


class OneBehind(NGram):
    """Another method than it says."""

    def propose(self, context: DraftContext) -> Drafts:
        drafts = super().propose(context)
        return replace(drafts, ids=drafts.ids.where(drafts.ids < 0, (drafts.ids + 1) % 64))


class Improper(NGram):
    """Distributions that sum to two."""

    def propose(self, context: DraftContext) -> Drafts:
        drafts = super().propose(context)
        return replace(drafts, probs=None if drafts.probs is None else drafts.probs * 2)


class MixesRows(NGram):
    """A row's drafts come from its neighbour's history where its own has none."""

    def propose(self, context: DraftContext) -> Drafts:
        drafts = super().propose(context)
        other = drafts.ids.roll(1, 0)
        return replace(drafts, ids=drafts.ids.where(drafts.ids >= 0, other))


class Chancy(NGram):
    def propose(self, context: DraftContext) -> Drafts:
        drafts = super().propose(context)
        if Random().random() < 0.5 or drafts.ids.shape[1] < DRAFTS:
            return drafts
        return replace(drafts, ids=drafts.ids.where(drafts.ids < 0, Random().randrange(64)))


class BelievesItself(NGram):
    """Takes its drafts for kept as soon as it has made them."""

    def propose(self, context: DraftContext) -> Drafts:
        drafts = super().propose(context)
        for slot, row in zip(context.slots.tolist(), drafts.ids.tolist(), strict=True):
            self.histories[slot] += [i for i in row if i >= 0]
        return drafts


class Deaf(NGram):
    """Keeps the first of the observed tokens only."""

    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        super().observe(slots, ids, count.clamp(max=1))


class Remembers(NGram):
    """A slot's earlier owner lives on in it."""

    def open(self, openings: Sequence[SlotOpening]) -> None:
        for opening in openings:
            self.histories[opening.slot] += [*opening.prompt, *opening.output]


class Scribbles(NGram):
    """Uses what it was given as its own memory."""

    def propose(self, context: DraftContext) -> Drafts:
        drafts = super().propose(context)
        context.positions.add_(1)
        return drafts


class Unteachable(NGram):
    """Its trainer has a loss that nothing changes."""

    @classmethod
    def trainer(cls, training: HeadTraining) -> HeadTrainer:
        return StubbornTrainer()


class StubbornTrainer(HeadTrainer):
    def __init__(self) -> None:
        self._weight = torch.ones(3, requires_grad=True)

    @property
    def parameters(self) -> Sequence[Tensor]:
        return (self._weight,)

    def loss(self, texts: Sequence[HeadText]) -> Tensor:
        return 1.0 + 0.0 * self._weight.sum()

    def weights(self) -> Mapping[str, Tensor]:
        return {"weight": self._weight}

    @property
    def config(self) -> Mapping[str, Any]:
        return {}


#: The rule's own test, then others that see it, too.
BROKEN: dict[type[Speculator], str] = {
    Fickle: "test_describes_what_it_will_be",
    Hospitable: "test_foreign_targets_are_refused",
    Unteachable: "test_training_lowers_the_loss",
    Confused: "test_says_how_it_may_be_run",
    Overshoots: "test_drafts_are_tokens",
    LeavesVocabulary: "test_drafts_are_tokens test_drafts_are_those_of_the_definition test_probs_are_distributions",
    OneBehind: "test_drafts_are_those_of_the_definition test_probs_are_distributions",
    Improper: "test_probs_are_distributions",
    MixesRows: (
        "test_rows_do_not_depend_on_neighbours test_drafts_are_those_of_the_definition test_probs_are_distributions"
    ),
    BelievesItself: "test_the_same_history_gives_the_same_drafts",
    Deaf: "test_what_was_kept_counts",
    Remembers: "test_a_slot_that_is_opened_again_forgets",
    Scribbles: "test_nothing_that_is_given_changes",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_caught_by_its_test(broken: type[Speculator]) -> None:
    outcomes = run_suite(type("Broken", (NGramSuite,), {"part": broken}))
    failed = {outcome.test for outcome in outcomes if outcome.result == "failed"}
    assert failed == set(BROKEN[broken].split())


def test_chance_is_caught() -> None:
    outcomes = run_suite(type("Broken", (NGramSuite,), {"part": Chancy}), "same_history")
    assert [outcome.result for outcome in outcomes] == ["failed"]
