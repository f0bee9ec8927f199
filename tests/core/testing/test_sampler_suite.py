"""The sampler suite catches what it is for: a deliberately broken sampler an invariant, and the tests that see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from pegboard.contracts.sampler import (
    LogprobTensors,
    SampleOutput,
    Sampler,
    SamplerNeed,
    SampleRows,
    SlotOpening,
    VerifyOutput,
    VerifyRows,
)
from pegboard.testing import SamplerSuite, run_suite
from pegboard_sampling.torch_sampler import TorchSampler

replace = msgspec.structs.replace


def with_sampling(opening: SlotOpening, **changes: Any) -> SlotOpening:
    return replace(opening, sampling=replace(opening.sampling, **changes))


class Forgetful(TorchSampler):
    """Opens slots with other parameters than it was told."""

    def change(self, opening: SlotOpening) -> SlotOpening:
        raise NotImplementedError

    def open(self, openings: Sequence[SlotOpening]) -> None:
        super().open([self.change(opening) for opening in openings])


class IgnoresTemperature(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, temperature=min(1.0, opening.sampling.temperature * 1000))


class IgnoresTopK(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, top_k=int(opening.sampling.top_k == 1))


class IgnoresTopP(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, top_p=float(opening.sampling.top_p > 0))


class IgnoresMinP(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, min_p=0.0)


class PenalisesNoPrompt(Forgetful):
    """As if repetition counted the output only."""

    def change(self, opening: SlotOpening) -> SlotOpening:
        return replace(opening, prompt=())


class IgnoresBias(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, logit_bias={})


class IgnoresMinTokens(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, min_tokens=0)


class SeedsOf32Bits(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return replace(opening, seed=opening.seed & 0xFFFFFFFF)


class AlwaysRaw(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, logprobs_mode="raw")


class AlwaysProcessed(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, logprobs_mode="processed")


class AlwaysLogprobs(Forgetful):
    def change(self, opening: SlotOpening) -> SlotOpening:
        return with_sampling(opening, logprobs=opening.sampling.logprobs or 0)


class PrefersHighIds(TorchSampler):
    """Of equal logits."""

    def nudged(self, logits: Tensor) -> Tensor:
        return logits.double() + 1e-7 * torch.arange(logits.shape[1])

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        return super().sample(self.nudged(logits), rows)

    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        return super().score(self.nudged(logits), targets, top)


class PositionsOf32Bits(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        return super().sample(logits, replace(rows, positions=rows.positions & 0xFFFFFFFF))


class CountsRows(TorchSampler):
    """The noise of a row depends on its place."""

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        return super().sample(logits, replace(rows, positions=rows.positions + torch.arange(logits.shape[0])))


class FewRowsGreedily(TorchSampler):
    """A row alone takes another path."""

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        if logits.shape == (1, 700):
            logits = logits * 50
        return super().sample(logits, rows)


class OtherBitsInCompany(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        out = super().sample(logits, rows)
        if out.logprobs is None:
            return out
        return replace(out, logprobs=replace(out.logprobs, chosen=out.logprobs.chosen * (1 + 1e-7 * logits.shape[0])))


class ShortVocabulary(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        logits[:, 800:] = -torch.inf
        return super().sample(logits, rows)


class NaNIsZero(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        return super().sample(logits.masked_fill(logits.isnan(), 0), rows)


class NothingIsNaN(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        out = super().sample(logits, rows)
        return replace(out, ids=out.ids.clamp(min=-1))


class NeverCounts(TorchSampler):
    def __init__(self, need: SamplerNeed) -> None:
        super().__init__(need)
        self._table.advance = lambda *_: None  # type: ignore[method-assign]


class CountsForAnother(TorchSampler):
    """What a slot chose counts for the row before."""

    def __init__(self, need: SamplerNeed) -> None:
        super().__init__(need)
        advance = self._table.advance
        self._table.advance = lambda slots, ids, host: advance(slots.roll(1), ids, host)  # type: ignore[method-assign]


class OpensOnce(TorchSampler):
    """Remembers what slots chose in a former life, as far as penalties go."""

    def __init__(self, need: SamplerNeed) -> None:
        super().__init__(need)
        self.chosen: dict[int, tuple[int, ...]] = {}

    def open(self, openings: Sequence[SlotOpening]) -> None:
        super().open([replace(o, output=(*self.chosen.get(o.slot, ()), *o.output)) for o in openings])

    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        out = super().sample(logits, rows)
        if logits.shape[1] == 12:
            for slot, id in zip(rows.host_slots, out.ids.tolist(), strict=True):
                self.chosen[slot] = (*self.chosen.get(slot, ()), id)
        return out


class ShiftsLogits(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        out = super().sample(logits, rows)
        logits.sub_(1)
        return out


class ScoresInPlace(TorchSampler):
    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        found = super().score(logits, targets, top)
        targets.add_(1)
        return found


class ReadsAsIfContiguous(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        return super().sample(logits.as_strided(logits.shape, (logits.shape[1], 1)), rows)


class NarrowIds(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        out = super().sample(logits, rows)
        return replace(out, ids=out.ids.int())


class ScoresTheNext(TorchSampler):
    def score(self, logits: Tensor, targets: Tensor, top: int) -> LogprobTensors:
        return super().score(logits, (targets + 1) % logits.shape[1], top)


class AcceptsOneMore(TorchSampler):
    def verify(self, logits: Tensor, rows: VerifyRows) -> VerifyOutput:
        out = super().verify(logits, rows)
        return replace(out, count=(out.count + 1).clamp(max=rows.query_start.diff()))


class VerifiesAtOnePosition(TorchSampler):
    """Every draft of a row is chosen with the noise of its first position."""

    def verify(self, logits: Tensor, rows: VerifyRows) -> VerifyOutput:
        return super().verify(logits, replace(rows, positions=rows.positions - 1))


class TakesTreesForChains(TorchSampler):
    def verify(self, logits: Tensor, rows: VerifyRows) -> VerifyOutput:
        return super().verify(logits, replace(rows, parents=None))


class Standard(SamplerSuite):
    part = TorchSampler
    grid = "small"


class Undecided(TorchSampler):
    """Says something of itself that nobody can act on."""

    @classmethod
    def wants_probs(cls, options: Any) -> Any:
        return None


ORDER = "test_top_k_top_p_and_min_p_in_this_order"
ALL = "test_everything_at_once"
TREE = "test_verify_follows_the_path_through_a_tree"
BROKEN: list[tuple[type, set[str]]] = [
    (IgnoresBias, {"test_bias", ALL, "test_distribution", "test_processed_logprobs"}),
    (IgnoresMinP, {"test_min_p", ORDER, "test_exact_support", "test_distribution", "test_processed_logprobs"}),
    (SeedsOf32Bits, {"test_noise_is_the_definition"}),
    (PositionsOf32Bits, {"test_noise_is_the_definition"}),
    (FewRowsGreedily, {"test_place_and_neighbours_do_not_matter", "test_batch_invariant"}),
    (OtherBitsInCompany, {"test_batch_invariant"}),
    (ShortVocabulary, {"test_large_vocabularies"}),
    (NaNIsZero, {"test_a_broken_row_fails_alone"}),
    (NothingIsNaN, {"test_a_broken_row_fails_alone"}),
    (OpensOnce, {"test_opening_forgets"}),
    (ShiftsLogits, {"test_logits_are_not_changed"}),
    (ScoresInPlace, {"test_logits_are_not_changed"}),
    (ReadsAsIfContiguous, {"test_strided_logits"}),
    (NarrowIds, {"test_ids_are_int64_on_the_device"}),
    (AlwaysLogprobs, {"test_logprobs_only_when_asked"}),
    (AlwaysRaw, {"test_processed_logprobs"}),
    (AlwaysProcessed, {"test_raw_logprobs"}),
    (ScoresTheNext, {"test_score"}),
    (AcceptsOneMore, {"test_verify_keeps_what_sampling_would_have_chosen", TREE}),
    (VerifiesAtOnePosition, {"test_verify_keeps_what_sampling_would_have_chosen", TREE}),
    (TakesTreesForChains, {TREE}),
    (Undecided, {"test_says_what_verification_wants"}),
]
#: What is broken here shows in many tests that use it. These are among them.
BROAD: list[tuple[type, set[str]]] = [
    (
        PrefersHighIds,
        {"test_greedy_takes_the_first_of_equals", "test_exact_support", "test_raw_logprobs", "test_score"},
    ),
    (IgnoresTemperature, {"test_temperature", "test_distribution"}),
    (IgnoresTopK, {"test_top_k", "test_exact_support", "test_distribution"}),
    (IgnoresTopP, {"test_top_p", "test_exact_support", "test_distribution"}),
    (IgnoresMinTokens, {"test_min_tokens", "test_counts_advance_with_what_was_chosen"}),
    (PenalisesNoPrompt, {"test_penalties", "test_distribution"}),
    (CountsRows, {"test_place_and_neighbours_do_not_matter", "test_temperature"}),
    (NeverCounts, {"test_counts_advance_with_what_was_chosen", "test_opening_forgets"}),
    (CountsForAnother, {"test_counts_advance_with_what_was_chosen"}),
]


def suite_of(part: type, **declared: Any) -> type[SamplerSuite]:
    return type(part.__name__, (Standard,), {"part": part, **declared})


def failed(suite: type[SamplerSuite], keyword: str = "") -> set[str]:
    return {outcome.test for outcome in run_suite(suite, keyword) if outcome.result == "failed"}


@pytest.mark.parametrize(("part", "tests"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_sampler_is_caught_by_the_test_of_what_it_breaks(part: type, tests: set[str]) -> None:
    statistical = tests & {"test_exact_support", "test_distribution"}
    assert failed(suite_of(part), "" if statistical else "not exact_support and not distribution") == tests


@pytest.mark.parametrize(("part", "tests"), BROAD, ids=lambda x: getattr(x, "__name__", ""))
def test_what_many_tests_use_is_caught_by_its_own_too(part: type, tests: set[str]) -> None:
    assert failed(suite_of(part), " or ".join([*tests, "test_ids_are_int64"])) == tests


def test_the_one_that_all_are_made_of_passes() -> None:
    outcomes = run_suite(suite_of(TorchSampler, claims=("verify", "trees", "batch_invariant")))
    assert not [outcome for outcome in outcomes if outcome.result == "failed"]


def test_every_standard_test_catches_something() -> None:
    elsewhere = {"test_does_not_synchronise", "test_capturable"}  # seen on CUDA only
    base = {"test_serves_what_is_declared", "test_standard_tests_stand"}
    shown = set().union(elsewhere, base, *(tests for _, tests in [*BROKEN, *BROAD]))
    assert shown == SamplerSuite.standard_tests()


def test_a_sampler_that_verifies_nothing_must_say_so() -> None:
    class Plain(TorchSampler):
        verify = Sampler.verify  # type: ignore[assignment]

    class Honest(Plain):
        @classmethod
        def refusals(cls, need: SamplerNeed, options: Any) -> Sequence[str]:
            return ["verifies no drafts"] if need.max_drafts else []

    assert failed(suite_of(Plain), "verify") == {"test_verify_keeps_what_sampling_would_have_chosen", TREE}
    skipped, _of_trees = run_suite(suite_of(Honest), "verify")
    assert (skipped.result, skipped.reason) == ("skipped", "refused: verifies no drafts")
    assert failed(suite_of(Honest, claims=("verify",)), "declared") == {"test_serves_what_is_declared"}


class Waits(TorchSampler):
    def sample(self, logits: Tensor, rows: SampleRows) -> SampleOutput:
        assert not bool(logits.isnan().any())
        return super().sample(logits, rows)


@pytest.mark.gpu
def test_waiting_for_the_device_is_caught() -> None:
    assert failed(suite_of(Waits, device="cuda"), "synchronise or strided") == {"test_does_not_synchronise"}
