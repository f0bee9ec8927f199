"""Broken schedulers, one for each rule: the suite catches every one of them, by the test that states the rule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from pegboard.contracts.scheduler import (
    FinishReason,
    Progress,
    Scheduler,
    SchedulerNeed,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from pegboard.testing.conformance import run_suite
from pegboard.testing.scheduler import SchedulerSuite
from pegboard_scheduling.continuous import ContinuousScheduler
from pegboard_scheduling.options import ContinuousOptions


class ForgetsPages(ContinuousScheduler):
    """Reuses a prefix's entries and does not wait for the copies of a shared page."""

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        return None if plan is None else replace(plan, copies=())


class DropsTables(ContinuousScheduler):
    """Tells the device of no page after the first."""

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        return None if plan is None else replace(plan, tables=tuple(replace(t, pages=t.pages[:1]) for t in plan.tables))


class LovesDrafts(ContinuousScheduler):
    """Drafts for everybody, asked for or not."""

    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        most = self.ledger.need.decode_width - 1
        super().add([replace(spec, max_drafts=most) for spec in sequences])


class NeverDrafts(ContinuousScheduler):
    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        super().add([replace(spec, max_drafts=0) for spec in sequences])


class KeepsSample(ContinuousScheduler):
    """A preempted sequence keeps the last token that it was given, and is given it again."""

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        before = {seq.id: len(seq.tokens) for seq in self.ledger._live.values() if seq.preemptions}
        progress = super().commit(result)
        again = []
        for one in progress:
            extra = one.tokens[:1] if before.get(one.id) and not getattr(self, "done", False) else ()
            self.done = getattr(self, "done", False) or bool(extra)
            again.append(replace(one, tokens=(*extra, *one.tokens)))
        return tuple(again)


class HidesPreemptions(ContinuousScheduler):
    def stats(self) -> Any:
        return replace(super().stats(), preemptions_total=0)


class OneMore(ContinuousScheduler):
    """Says "length" a token late."""

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        return tuple(
            replace(one, tokens=(*one.tokens, 0)) if one.finish_reason == "length" else one
            for one in super().commit(result)
        )


class StopsLate(ContinuousScheduler):
    """Does not look for stop ids."""

    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        super().add(sequences)
        for spec in sequences:
            self.ledger._live[spec.id].stop_ids = frozenset()


class StopsEarly(ContinuousScheduler):
    """Ends with the first stop id, however few tokens there are."""

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        for one in () if result is None else result.rows:
            seq = self.ledger._live.get(one.id)
            if seq is not None and seq.spec.sampling.min_tokens > seq.output_length + 1 and seq.output_length:
                self.ledger.finish(one.id, "stop")
        return super().commit(result)


class RunsAhead(ContinuousScheduler):
    """Forgets who needs the host."""

    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        super().add([replace(spec, needs_host_token=False) for spec in sequences])


class NeverAhead(ContinuousScheduler):
    """Waits for every token as if all rows needed it."""

    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        super().add([replace(spec, needs_host_token=True) for spec in sequences])


class ScoresTwice(ContinuousScheduler):
    """Tells of the first prompt tokens again with each chunk."""

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        return tuple(
            replace(p, prompt_logprobs=(*p.prompt_logprobs, *p.prompt_logprobs[:1])) for p in super().commit(result)
        )


class TooMany(ContinuousScheduler):
    """A token more than the engine has room for."""

    def __init__(self, need: SchedulerNeed, *others: Any) -> None:
        super().__init__(replace(need, max_step_tokens=need.max_step_tokens + 1), *others)


class DecodesLast(ContinuousScheduler):
    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        return None if plan is None else replace(plan, rows=plan.rows[::-1])


class Moves(ContinuousScheduler):
    """A preempted sequence comes back in another slot."""

    def schedule(self) -> StepPlan | None:
        for seq in self.ledger._preempted:
            if self.ledger._slots:
                self.ledger._slots.insert(0, seq.slot)
                seq.slot = self.ledger._slots.pop()
        return super().schedule()


class NoOpening(ContinuousScheduler):
    """Does not say what a slot's state is built from when a sequence starts over."""

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is None:
            return None
        again = {row.id for row in plan.rows if row.id in self.ledger._live and self.ledger._live[row.id].preemptions}
        return replace(plan, rows=tuple(replace(r, opening=None) if r.id in again else r for r in plan.rows))


class Fickle(ContinuousScheduler):
    """Every second one that is made serves equals in the opposite order."""

    made = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Fickle.made += 1
        self.sign, self.ranked = (-1) ** Fickle.made, 0

    def rank(self, spec: SequenceSpec) -> float:
        self.ranked += 1
        return super().rank(spec) + self.sign * 1e-6 * self.ranked


class AbortsLate(ContinuousScheduler):
    """Tells of an abort only when the sequence's next row retires."""

    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        self.late = {**getattr(self, "late", {}), id: 3}
        return super().finish(id, reason, error)

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        held = [*getattr(self, "held", []), *super().commit(result)]
        late = getattr(self, "late", {})
        self.late = {id: left - 1 for id, left in late.items() if left > 1}
        self.held = [p for p in held if p.id in self.late]
        return tuple(p for p in held if p.id not in self.late)

    def has_work(self) -> bool:
        return super().has_work() or bool(getattr(self, "held", []))


class EndsTwice(ContinuousScheduler):
    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        return super().finish(id, reason, error) or reason == "abort"


class NoDeadlines(ContinuousScheduler):
    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        super().add([replace(spec, deadline=None) for spec in sequences])


class LateDeadlines(ContinuousScheduler):
    """Looks at the deadlines of those that wait only."""

    def schedule(self) -> StepPlan | None:
        due, self.ledger._deadlines = self.ledger._deadlines, []
        for item in due:
            if item[2].phase != "running":
                self.ledger._deadlines.append(item)
        plan = super().schedule()
        self.ledger._deadlines = due
        return plan


class KeepsPages(ContinuousScheduler):
    """Pages of an aborted sequence are never released."""

    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        if reason == "abort" and id in self.ledger._live and self.ledger._live[id].phase == "running":
            release, self.ledger.cache.release = self.ledger.cache.release, lambda *a: None  # type: ignore[method-assign]
            try:
                return super().finish(id, reason, error)
            finally:
                self.ledger.cache.release = release  # type: ignore[method-assign]
        return super().finish(id, reason, error)


class FailsAll(ContinuousScheduler):
    """A lost step ends everybody."""

    def fail(self, step: int, error: str) -> None:
        super().fail(step, error)
        for id in list(self.ledger._live):
            self.ledger.finish(id, "error", error)


class ShrugsLosses(ContinuousScheduler):
    """Takes any step for lost."""

    def fail(self, step: int, error: str) -> None:
        if any(step == flight for flight, _ in self.ledger._flights):
            super().fail(step, error)


class KeepsTainted(ContinuousScheduler):
    """What a row with NaN has computed is reused."""

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        if result is not None:
            result = replace(result, rows=tuple(replace(row, tainted=False) for row in result.rows))
        return super().commit(result)


class FailsNeighbours(ContinuousScheduler):
    """A row that failed takes its step along."""

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        if result is not None and any(row.error for row in result.rows):
            result = replace(result, rows=tuple(replace(row, error="NaN") for row in result.rows))
        return super().commit(result)


class Boasts(ContinuousScheduler):
    """Reports the whole prompt as cached."""

    def commit(self, result: StepResult | None) -> tuple[Progress, ...]:
        return tuple(replace(p, cached_tokens=p.cached_tokens and 29) for p in super().commit(result))


class Flat(ContinuousScheduler):
    """Claims priorities, and has none."""

    def rank(self, spec: SequenceSpec) -> float:
        return 0


class Starves(ContinuousScheduler):
    def rank(self, spec: SequenceSpec) -> float:
        return -spec.priority


class AdmitsHalf(ContinuousScheduler):
    """Takes those in that fit before it raises."""

    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        for spec in sequences:
            super().add([spec])


class AdmitsAnything(ContinuousScheduler):
    """Takes in what is longer than the engine's limit, cut to it."""

    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        most = self.ledger.need.max_length
        super().add([replace(spec, max_length=min(spec.max_length, most)) for spec in sequences])


class Replaces(ContinuousScheduler):
    """A live id ends the older one."""

    def add(self, sequences: Sequence[SequenceSpec]) -> None:
        for spec in sequences:
            if spec.id in self.ledger._live:
                self.ledger.finish(spec.id, "abort")
        super().add(list({spec.id: spec for spec in sequences}.values()))


class NeverPauses(ContinuousScheduler):
    def pause(self, id: str) -> bool:
        return self.ledger.is_live(id)

    def resume(self, id: str) -> bool:
        return self.ledger.is_live(id)


class ForksFresh(ContinuousScheduler):
    """A fork begins with the prompt, without what its parent has chosen."""

    def fork(self, parent: str, child: SequenceSpec, tokens: Sequence[int] = ()) -> None:
        if not self.ledger.is_live(parent):
            raise KeyError(parent)
        self.ledger.add([child])


class ForgetsChoices(ContinuousScheduler):
    """Tells of the host's tokens, and goes on without them."""

    def extend(self, id: str, tokens: Sequence[int]) -> None:
        super().extend(id, tokens)
        if id in self.ledger._live:
            del self.ledger._live[id].tokens[-len(tokens) :]


class LosesAborts(ContinuousScheduler):
    """Every hundredth abort is lost."""

    count = 0

    def finish(self, id: str, reason: FinishReason, error: str | None = None) -> bool:
        self.count += 1
        return True if self.count % 100 == 0 else super().finish(id, reason, error)


#: The rule's own test, then others that see it, too; "..." stands for any more.
BROKEN: dict[type[Scheduler], str] = {
    ForgetsPages: "test_outputs_are_those_of_each_alone ...",
    DropsTables: "test_outputs_are_those_of_each_alone ...",
    LovesDrafts: "test_drafts_change_no_output",
    NeverDrafts: "test_drafts_change_no_output",
    KeepsSample: "test_preemption_changes_no_output ...",
    HidesPreemptions: "test_preemption_changes_no_output",
    OneMore: "test_max_length_is_exact ...",
    StopsLate: "test_stops_wait_for_min_tokens test_drafts_change_no_output test_outputs_are_those_of_each_alone",
    StopsEarly: "test_stops_wait_for_min_tokens test_drafts_change_no_output test_outputs_are_those_of_each_alone",
    RunsAhead: "test_host_tokens_are_waited_for test_chosen_tokens_are_taken_up test_forks_go_on_like_their_parent",
    NeverAhead: "test_host_tokens_are_waited_for",
    ScoresTwice: "test_prompt_logprobs_are_told_once",
    TooMany: "test_limits_are_kept",
    DecodesLast: "test_decode_rows_come_first",
    Moves: "test_slots_are_held_for_life",
    NoOpening: "test_slots_are_held_for_life ...",
    Fickle: "test_the_same_calls_give_the_same_plans",
    AbortsLate: "test_aborts_at_any_moment test_many_cancels_leak_nothing",
    EndsTwice: "test_aborts_at_any_moment",
    NoDeadlines: "test_deadlines_end_what_is_late",
    LateDeadlines: "test_deadlines_end_what_is_late",
    KeepsPages: "test_everything_is_given_back test_many_cancels_leak_nothing test_the_host_chooses_where_it_says",
    FailsAll: "test_lost_steps_end_their_rows_only",
    ShrugsLosses: "test_lost_steps_end_their_rows_only",
    KeepsTainted: "test_a_failed_row_hurts_no_other",
    FailsNeighbours: "test_a_failed_row_hurts_no_other",
    Boasts: "test_cached_tokens_were_not_computed",
    Flat: "test_higher_priority_goes_first",
    Starves: "test_nobody_starves",
    AdmitsHalf: "test_all_or_none_are_admitted test_live_ids_are_refused",
    AdmitsAnything: "test_what_can_never_run_is_refused",
    Replaces: "test_live_ids_are_refused",
    NeverPauses: "test_the_paused_wait",
    ForksFresh: "test_forks_go_on_like_their_parent test_chosen_tokens_are_taken_up",
    ForgetsChoices: "test_chosen_tokens_are_taken_up test_the_host_chooses_where_it_says",
    LosesAborts: "test_many_cancels_leak_nothing",
}


def suite_of(broken: type[Scheduler]) -> type[SchedulerSuite]:
    claims = ("drafts", "preemption", "priorities", "ageing")
    fields = {"part": broken, "options": ContinuousOptions(), "claims": claims, "grid": "normal"}
    return type("Broken", (SchedulerSuite,), fields)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_caught_by_its_test(broken: type[Scheduler]) -> None:
    """And by no other than those that the table names: with PEGBOARD_FULL the whole suite is run for that."""
    own, *others = BROKEN[broken].split()
    full = bool(os.environ.get("PEGBOARD_FULL"))
    outcomes = run_suite(suite_of(broken), "not random_use" if full else own)
    failed = {outcome.test for outcome in outcomes if outcome.result == "failed"}
    assert own in failed
    assert not full or "..." in others or failed == {own, *others}


def test_random_use_finds_it_too() -> None:
    few = type("Few", (suite_of(EndsTwice),), {"grid": "normal", "depths": (0,)})
    (outcome,) = run_suite(few, "test_random_use")
    assert outcome.result == "failed"
    assert "ends twice" in outcome.reason
