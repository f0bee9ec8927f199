"""How many drafts rows get, by acceptance and costs that are known."""

from __future__ import annotations

import pytest

from pegboard.runner.adapting import DraftLimits, _Step

MOST = 6


def driven(
    limits: DraftLimits, acceptance: float, plain: float, draft: float, steps: int = 300, rows: int = 4
) -> list[int]:
    """Drafts of each step, on a machine where a step costs `plain` and each draft of a row `draft`, and each draft is
    accepted with the same probability, exactly."""
    given, rest = [], [0.0] * MOST
    for _ in range(steps):
        k = limits.next()
        accepted = []
        for place in range(k):
            rest[place] += rows * acceptance ** (place + 1)
            whole = min(int(rest[place]), accepted[-1] if accepted else rows)
            rest[place] -= whole
            accepted.append(whole)
        step = _Step(rows, rows * k, rows + sum(accepted), plain + draft * rows * k)
        limits.take([rows] * k, accepted, step)
        given.append(k)
    return given


def best(acceptance: float, plain: float, draft: float, rows: int = 4) -> int:
    """By the definition."""
    gains = [sum(acceptance**j for j in range(k + 1)) / ((plain + draft * rows * k) / plain) for k in range(MOST + 1)]
    top = max(gains)
    return 0 if top < 1.03 else gains.index(top)


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("draft", [0.0001, 0.02, 0.06, 0.2])
def test_k_is_the_one_that_pays_most(acceptance: float, draft: float) -> None:
    """A step of 4 rows costs 1. Some steps are of the other kind, so that it is known when they would do better."""
    limits = DraftLimits(MOST, adapts=True)
    given = driven(limits, acceptance, 1.0, draft)[-100:]
    wanted = best(acceptance, 1.0, draft)
    usual = max(set(given), key=given.count)
    near = [k for k in range(MOST + 1) if abs(k - wanted) <= 1]
    assert usual in near
    assert given.count(usual) >= 85


def test_speed_ups_are_those_of_the_machine() -> None:
    limits = DraftLimits(MOST, adapts=True)
    given = driven(limits, 0.8, 1.0, 0.02)
    k = given[-1]
    kept = sum(0.8**j for j in range(k + 1))
    assert limits.predicted == pytest.approx(kept / (1 + 0.08 * k), rel=0.05)
    assert limits.measured == pytest.approx(limits.predicted, rel=0.1)
    assert limits.break_even == pytest.approx(1 + 0.08 * k, rel=0.05)


def test_what_stops_paying_is_turned_off_and_on_again() -> None:
    limits = DraftLimits(MOST, adapts=True)
    assert driven(limits, 0.9, 1.0, 0.05)[-1] > 2
    off = driven(limits, 0.02, 1.0, 0.1)[-64:]
    assert off.count(0) >= 56
    assert max(off) == MOST, "nobody would notice a change"
    assert driven(limits, 0.95, 1.0, 0.02)[-1] >= 4


def test_without_adapting_every_row_has_all() -> None:
    limits = DraftLimits(MOST, adapts=False)
    assert set(driven(limits, 0.0, 1.0, 1.0)) == {MOST}
    assert limits.predicted is None  # nothing plain to compare with
    assert limits.break_even is None


def test_steps_with_prompts_say_nothing_of_costs() -> None:
    limits = DraftLimits(MOST, adapts=True)
    for _ in range(100):
        limits.take([3], [3], None)
    assert limits.predicted is limits.measured is None
    assert limits.allowed == MOST
