"""Conformance of speculators: drafts depend on a slot's own history alone, and never leave the vocabulary."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import ClassVar

import pytest
import torch

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.model import ModelSpec
from pegboard.contracts.sampler import SamplingParams, SlotOpening
from pegboard.contracts.speculator import (
    DraftContext,
    Drafts,
    DraftTarget,
    HeadText,
    HeadTraining,
    Speculator,
    SpeculatorNeed,
    SpeculatorSpec,
)
from pegboard.devices import torch_device
from pegboard.heads.attention import attend_in_torch

from .conformance import Candidate, Suite, check, no_synchronisation, normal, same_bits, unchanged

VOCABULARY = 64
MAX_LENGTH = 96
SLOTS = 6
HIDDEN = 32

#: What a target model is unless a suite says otherwise: small numbers, three layers.
TARGET = ModelSpec(
    architecture="Target",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    layers=(AttentionLayer(query_heads=2, kv_heads=1, head_size=16, scale=0.25),) * 3,
    context_length=MAX_LENGTH,
    linears=(),
    other_parameters=0,
    activations=("silu",),
    activation_width=0,
)


class StandInTarget(DraftTarget):
    """The ends of a target: random embedding [V, E] and head [V, E] in float32. `state` is what its layers would give:
    numbers made from a text."""

    def __init__(self, spec: ModelSpec, device: str) -> None:
        self.size, self.device = spec.hidden_size, device
        self.embedding = normal(spec.vocab_size, spec.hidden_size, seed=1).float().to(device)
        self.matrix = normal(spec.vocab_size, spec.hidden_size, seed=2).float().to(device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.matrix.T

    def state(self, text: Sequence[int]) -> torch.Tensor:
        """[E], after the last token of a text."""
        return normal(self.size, seed=zlib.crc32(bytes(text))).float().to(self.device)


class SpeculatorSuite(Suite, standard=True):
    """A speculator against `pegboard.contracts.speculator`.

    A slot's history is the prompt and output of its opening and what `observe` told since; `propose` comes after them,
    with the history's last token in `last_ids`. One that asks for hidden states is attached to a `StandInTarget`, and
    told the states of every history, whose last token is always an observed one. Features: "probs" (draft
    distributions, when they are wanted). A speculator that has layers of its own needs `make_context` overridden."""

    role = "speculator"
    features = ("probs",)

    #: The model that it drafts for.
    target: ClassVar[ModelSpec] = TARGET
    #: Declared: targets that it must refuse, each with a word that its reason has, e.g. ("vocabulary", spec).
    foreign: ClassVar[tuple[tuple[str, ModelSpec], ...]] = ()

    @classmethod
    def need(cls, target: ModelSpec | None = None, wants_probs: bool = False) -> SpeculatorNeed:
        return SpeculatorNeed(
            device=cls.facts(),
            target=target or cls.target,
            slots=SLOTS,
            max_length=MAX_LENGTH,
            wants_probs=wants_probs,
        )

    @classmethod
    def declared_needs(cls) -> Iterable[tuple[str, SpeculatorNeed]]:
        yield "its target", cls.need()
        if "probs" in cls.claims:
            yield "claim probs", cls.need(wants_probs=True)

    def reference(self, history: Sequence[int], drafts: int) -> Sequence[int] | None:
        """The drafts that follow a history, by the definition of the method; fewer than `drafts` where it proposes
        fewer. None: there is no such definition (a draft model), and the test of it is skipped."""
        return None

    def make_context(
        self, spec: SpeculatorSpec, slots: Sequence[int], histories: Sequence[Sequence[int]], drafts: int
    ) -> DraftContext:
        """State after the target's last step, for these slots. Taps are numbers made from a row's history."""
        if spec.layers:
            pytest.skip("it has layers of its own: override make_context to give it their batch")
        device = torch_device(self.facts())
        rows = [normal(self.target.hidden_size, seed=sum(history)).float() for history in histories]
        return DraftContext(
            slots=torch.tensor(slots, device=device),
            last_ids=torch.tensor([history[-1] for history in histories], device=device),
            positions=torch.tensor([len(history) - 1 for history in histories], device=device),
            taps=tuple(torch.stack(rows).to(device) * (tap + 1) for tap in spec.taps),
            batch=None,
            drafts=drafts,
        )

    @pytest.fixture
    def spec(self, candidate: Candidate) -> SpeculatorSpec:
        """What the speculator says that it is."""
        candidate.require(self.need())
        described: SpeculatorSpec = candidate.factory.describe(self.need(), candidate.options)
        return described

    @pytest.fixture
    def make(self, candidate: Candidate) -> Callable[..., Speculator]:
        """make(**{"3": history, ...}) or make({3: history}): a speculator with these slots open."""

        def open_slots(histories: dict[int, Sequence[int]], wants_probs: bool = False) -> Speculator:
            need = self.need(wants_probs=wants_probs)
            made: Speculator = candidate.create(need)
            spec = candidate.factory.describe(need, candidate.options)
            if spec.hidden != "none":
                made.attach(self.stand_in())
            self.open_slots(made, spec, histories)
            return made

        return open_slots

    @classmethod
    def stand_in(cls) -> StandInTarget:
        """The same each time."""
        return StandInTarget(cls.target, torch_device(cls.facts()))

    def open_slots(self, speculator: Speculator, spec: SpeculatorSpec, histories: Mapping[int, Sequence[int]]) -> None:
        """As an engine does: a slot whose states are told is opened without its last token, which then is chosen."""
        if spec.hidden == "none" or not histories:
            speculator.open([opening(slot, history) for slot, history in histories.items()])
            return
        target = self.stand_in()
        speculator.open([opening(slot, history[:-1]) for slot, history in histories.items()])
        for slot, history in histories.items():
            known = len(history) - 2
            for start in range(0, known if spec.hidden == "all" else 0, 16):
                end = min(start + 16, known)
                states = [target.state(history[: place + 1]) for place in range(start, end)]
                speculator.observe_prompt(slot, start, torch.stack(states))
        self.tell(speculator, spec, {slot: (history, len(history) - 1) for slot, history in histories.items()})

    def tell(self, speculator: Speculator, spec: SpeculatorSpec, kept: Mapping[int, tuple[Sequence[int], int]]) -> None:
        """Observe what each slot's text has from a place on."""
        device, width = torch_device(self.facts()), 1 + spec.drafts
        rows = [list(text[start:]) + [-1] * (width - len(text) + start) for text, start in kept.values()]
        slots, ids = torch.tensor(list(kept), device=device), torch.tensor(rows, device=device)
        count = (ids >= 0).sum(1)
        speculator.observe(slots, ids, count)
        if spec.hidden == "none":
            return
        target = self.stand_in()
        hidden = torch.full((len(kept), width, target.size), float("nan"), device=device)
        for row, (text, start) in enumerate(kept.values()):
            for place in range(start, len(text)):
                hidden[row, place - start] = target.state(text[:place])
        with unchanged(slots=slots, ids=ids, count=count, hidden=hidden):
            speculator.observe_hidden(slots, ids, count, hidden)

    def drafts_of(
        self, speculator: Speculator, spec: SpeculatorSpec, histories: dict[int, Sequence[int]], drafts: int = 0
    ) -> Drafts:
        """What it proposes for these slots, in this order; as many as it can, unless `drafts` says fewer."""
        context = self.make_context(spec, list(histories), list(histories.values()), drafts or spec.drafts)
        return speculator.propose(context)

    # -- what it says of itself --------------------------------------------------------------------------------------

    def test_describes_what_it_will_be(self, candidate: Candidate, spec: SpeculatorSpec) -> None:
        """From options and headers alone: the same each time, and possible for the target."""
        check(
            candidate.factory.describe(self.need(), candidate.options) == spec, "describe says something else each time"
        )
        check(spec.drafts >= 1, f"{spec.drafts} drafts a row")
        outside = [tap for tap in spec.taps if not 0 <= tap < len(self.target.layers)]
        check(not outside, f"taps {outside} of a target with {len(self.target.layers)} layers")
        check(spec.weight_bytes >= 0, f"weight_bytes is {spec.weight_bytes}")

    def test_foreign_targets_are_refused(self, candidate: Candidate) -> None:
        """A target of another vocabulary, or with a longer context, is refused with a reason, not met in a step."""
        if not self.foreign:
            pytest.skip("no target is declared foreign")
        for word, target in self.foreign:
            reasons = candidate.refusals(self.need(target))
            check(any(word in reason for reason in reasons), f"no reason names {word!r}: {reasons or 'it is accepted'}")

    def test_says_how_it_may_be_run(self, make: Callable[..., Speculator]) -> None:
        """What needs the host's view can't be recorded into a graph."""
        made = make({})
        check(not (made.capturable and made.needs_host_token), "capturable, and needs the host's tokens")

    def test_training_lowers_the_loss(self, candidate: Candidate) -> None:
        """Where it has a trainer: a finite loss of leaves in float32, the same from the same seed, that falls; texts
        keep their bits."""
        target, spec = self.stand_in(), self.target
        training = HeadTraining(
            target=spec,
            config={},
            embedding=target.embedding,
            head=target.matrix,
            attention=attend_in_torch,
            drafts=2,
            seed=5,
        )
        try:
            trainer = candidate.factory.trainer(training)
        except NotImplementedError:
            pytest.skip("nothing of it is trained")
        histories = [history for history in some_histories().values() if len(history) > 3]
        texts = []
        for history in histories:
            hidden = torch.stack([target.state(history[: place + 1]) for place in range(len(history) - 1)])
            ids = torch.tensor(history, device=hidden.device)
            texts.append(HeadText(ids=ids, hidden=hidden, greedy=target.head(hidden).argmax(-1)))
        leaves = trainer.parameters
        odd = [part for part in leaves if not (part.is_leaf and part.requires_grad and part.dtype == torch.float32)]
        check(bool(leaves) and not odd, f"{len(odd)} of {len(leaves)} parameters are no float32 leaves with gradients")
        with unchanged(ids=texts[0].ids, hidden=texts[0].hidden, greedy=texts[0].greedy):
            first = float(trainer.loss(texts).detach())
        again = float(candidate.factory.trainer(training).loss(texts).detach())
        check(math.isfinite(first) and first == again, f"the same seed begins with a loss of {first}, then of {again}")
        check(bool(trainer.weights()), "it has no weights to write")
        optimiser = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.0)
        for _ in range(12):
            optimiser.zero_grad()
            trainer.loss(texts).backward()
            optimiser.step()
        last = float(trainer.loss(texts).detach())
        check(last < 0.9 * first, f"twelve steps lower the loss from {first:.4f} to {last:.4f} only")

    # -- drafts ------------------------------------------------------------------------------------------------------

    def test_drafts_are_tokens(self, make: Callable[..., Speculator], spec: SpeculatorSpec) -> None:
        """int64 [R, k] on the device with at most the wanted k, each in the vocabulary or -1, nothing after a gap of a
        chain, every parent before its child."""
        histories = some_histories()
        made = make(histories)
        for wanted in range(1, spec.drafts + 1):
            found = self.drafts_of(made, spec, histories, wanted)
            ids = found.ids
            check(ids.dtype == torch.int64 and ids.dim() == 2, f"ids are {ids.dtype} {tuple(ids.shape)}")
            check(ids.device == torch.device(torch_device(self.facts())), f"ids are on {ids.device}")
            check(len(ids) == len(histories), f"ids of {len(ids)} rows for {len(histories)}")
            check(ids.shape[1] <= wanted, f"{ids.shape[1]} drafts a row, {wanted} are wanted")
            low, high = int(ids.min()), int(ids.max())
            check(low >= -1 and high < self.target.vocab_size, f"ids from {low} to {high}")
            if found.parents is None:
                gap = (ids[:, :-1] < 0) & (ids[:, 1:] >= 0)
                check(not gap.any(), f"a draft follows a gap in rows {gap.any(1).nonzero().flatten().tolist()}")
            else:
                place = torch.arange(ids.shape[1], device=ids.device)
                fine = (found.parents >= 0) & (found.parents <= place)
                check(found.parents.shape == ids.shape, f"parents of shape {tuple(found.parents.shape)}")
                check(bool((fine | (ids < 0)).all()), "a draft hangs on itself or on a later one")

    def test_drafts_are_those_of_the_definition(self, make: Callable[..., Speculator], spec: SpeculatorSpec) -> None:
        """Against `reference`, from short histories to the longest."""
        if self.reference([1, 2, 3], 1) is None:
            pytest.skip("no reference is given")
        for seed in range(20):
            histories = some_histories(seed)
            found = self.drafts_of(make(histories), spec, histories).ids.tolist()
            for row, (slot, history) in zip(found, histories.items(), strict=True):
                expected = list(self.reference(history, spec.drafts) or [])
                check(
                    [i for i in row if i >= 0] == expected, f"slot {slot}: {row} after {history}, expected {expected}"
                )

    def test_probs_are_distributions(self, candidate: Candidate, make: Callable[..., Speculator]) -> None:
        """float32 [R, k, V]; each sums to 1, and a draft was possible."""
        candidate.require(self.need(wants_probs=True))
        spec = candidate.factory.describe(self.need(wants_probs=True), candidate.options)
        histories = some_histories()
        found = self.drafts_of(make(histories, wants_probs=True), spec, histories)
        if found.probs is None:
            check("probs" not in self.claims, 'claims "probs", and gives none')
            pytest.skip("gives no draft distributions")
        check(found.probs.dtype == torch.float32, f"probs are {found.probs.dtype}")
        shape = (*found.ids.shape, self.target.vocab_size)
        check(found.probs.shape == shape, f"probs of shape {tuple(found.probs.shape)}, expected {shape}")
        real = found.ids >= 0
        off = (found.probs.sum(-1) - 1).abs()[real]
        check(
            not off.numel() or float(off.max()) < 1e-4,
            f"distributions sum to 1 +- {float(off.max() if off.numel() else 0)}",
        )
        own = found.probs.gather(-1, found.ids.clamp(min=0)[..., None])[..., 0][real]
        check(bool((own > 0).all()), "a draft has no probability in the distribution that it was drawn from")

    # -- state -------------------------------------------------------------------------------------------------------

    def test_rows_do_not_depend_on_neighbours(self, make: Callable[..., Speculator], spec: SpeculatorSpec) -> None:
        """Alone, beside others, and in any order a slot gets the same drafts."""
        histories = some_histories()
        together = self.drafts_of(make(histories), spec, histories)
        turned = dict(reversed(histories.items()))
        backwards = self.drafts_of(make(histories), spec, turned)
        check(same_bits(together.ids, backwards.ids.flip(0)), "drafts depend on the order of rows")
        for place, (slot, history) in enumerate(histories.items()):
            alone = self.drafts_of(make({slot: history}), spec, {slot: history})
            row = together.ids[place, : alone.ids.shape[1]]
            check(
                same_bits(alone.ids[0], row),
                f"slot {slot}: {alone.ids[0].tolist()} alone, {row.tolist()} beside others",
            )

    def test_the_same_history_gives_the_same_drafts(
        self, make: Callable[..., Speculator], spec: SpeculatorSpec
    ) -> None:
        """Another speculator, and the same one again: to propose changes nothing, since drafts may be rejected."""
        histories = some_histories()
        made = make(histories)
        first = self.drafts_of(made, spec, histories).ids.clone()
        for _ in range(6):
            again = self.drafts_of(made, spec, histories).ids
            check(same_bits(first, again), "drafts differ when they are asked for again")
            check(same_bits(first, self.drafts_of(make(histories), spec, histories).ids), "drafts differ by chance")

    def test_what_was_kept_counts(self, make: Callable[..., Speculator], spec: SpeculatorSpec) -> None:
        """A history that was observed, a few tokens at a time, is as good as one that a slot was opened with."""
        histories = some_histories()
        expected = self.drafts_of(make(histories), spec, histories).ids
        random = Random(1)
        made = make({slot: history[:3] for slot, history in histories.items()})
        told = dict.fromkeys(histories, 3)
        while any(told[slot] < len(history) for slot, history in histories.items()):
            self.observe_some(made, spec, histories, told, random)
        for _ in range(MAX_LENGTH):
            found = self.drafts_of(made, spec, histories).ids
            if bool(((found[:, 0] < 0) == (expected[:, 0] < 0)).all()):
                break  # who catches up a few tokens at a time proposes nothing meanwhile
        check(
            same_bits(found, expected),
            f"observed tokens give drafts {found.tolist()}, the same tokens in an opening {expected.tolist()}",
        )

    def observe_some(
        self,
        speculator: Speculator,
        spec: SpeculatorSpec,
        histories: Mapping[int, Sequence[int]],
        told: dict[int, int],
        random: Random,
    ) -> None:
        """Tell of the next tokens of some slots, 1 to 1 + k each."""
        slots = [slot for slot, history in histories.items() if told[slot] < len(history) and random.random() < 0.7]
        if not slots:
            return
        counts = [min(random.randint(1, 1 + spec.drafts), len(histories[slot]) - told[slot]) for slot in slots]
        kept = {}
        for slot, count in zip(slots, counts, strict=True):
            kept[slot] = (histories[slot][: told[slot] + count], told[slot])
            told[slot] += count
        self.tell(speculator, spec, kept)

    def test_a_slot_that_is_opened_again_forgets(self, make: Callable[..., Speculator], spec: SpeculatorSpec) -> None:
        """Its last owner's tokens are nobody's business, whatever was observed of them."""
        old = some_histories(1)
        # Two tokens that the old one has, too: who remembers it knows what follows them.
        for new in (some_histories(2), {slot: history[3:5] for slot, history in old.items()}):
            expected = self.drafts_of(make(new), spec, new).ids
            made = make(old)
            self.drafts_of(made, spec, old)
            more = {slot: (*history, 5, 6, 7) for slot, history in old.items()}
            self.observe_some(made, spec, more, {slot: len(history) for slot, history in old.items()}, Random(0))
            self.open_slots(made, spec, new)
            found = self.drafts_of(made, spec, new).ids
            check(same_bits(found, expected), "drafts depend on who had the slot before")

    def test_nothing_that_is_given_changes(self, make: Callable[..., Speculator], spec: SpeculatorSpec) -> None:
        histories = some_histories()
        made = make(histories)
        context = self.make_context(spec, list(histories), list(histories.values()), spec.drafts)
        given = {"slots": context.slots, "last_ids": context.last_ids, "positions": context.positions}
        with unchanged(**given, **{f"tap {i}": tap for i, tap in enumerate(context.taps)}):
            made.propose(context)
        device = torch_device(self.facts())
        ids = torch.full((len(histories), 1 + spec.drafts), -1, device=device)
        ids[:, 0] = 3
        count = torch.ones(len(histories), dtype=torch.int64, device=device)
        with unchanged(slots=context.slots, ids=ids, count=count):
            made.observe(context.slots, ids, count)

    def test_nothing_waits_for_the_device(self, make: Callable[..., Speculator], spec: SpeculatorSpec) -> None:
        """Unless it declares that it needs the host's view (CUDA only)."""
        histories = some_histories()
        made = make(histories)
        if made.needs_host_token:
            pytest.skip("it needs the host's view of each token, and says so")
        context = self.make_context(spec, list(histories), list(histories.values()), spec.drafts)
        made.propose(context)  # what is made at the first call may wait
        with no_synchronisation(self.device):
            made.propose(context)


def opening(slot: int, history: Sequence[int]) -> SlotOpening:
    """As a preempted sequence comes back: the first half is its prompt, the rest its output."""
    half = max(1, len(history) // 2)
    return SlotOpening(
        slot=slot,
        sampling=SamplingParams(),
        seed=slot,
        prompt=tuple(history[:half]),
        output=tuple(history[half:]),
        max_length=MAX_LENGTH,
    )


def some_histories(seed: int = 0) -> dict[int, Sequence[int]]:
    """Slot -> tokens: with repetitions and without, short, and as long as can be, slots in no order."""
    random = Random(f"histories {seed}")
    pattern = [random.randrange(VOCABULARY) for _ in range(5)]
    free = [random.randrange(VOCABULARY) for _ in range(MAX_LENGTH - 1)]
    return {
        4: tuple(pattern * 4 + pattern[:2]),
        0: tuple(free[:20]),
        5: (7,) * 12,
        2: tuple(free),
        1: tuple(free[:9] + free[:4]),
    }
