"""The programs of a sum that add it together, in every order of their looks at its word."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from pegboard_quant.int4 import adding

#: What a program's looks at the word found, in their order.
Seen = tuple[int, ...]
Step = Callable[[int, Seen], tuple[int | None, int | None]]


class _Next(Exception):
    """A program is about to add this to the word."""


@pytest.fixture
def step_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Step]:
    """step_of(parts, polls)(part, seen): what the kernel's function adds to the word next, or its duties."""

    def of(parts: int, polls: int) -> Step:
        for name in ("_COUNT", "_GONE"):
            monkeypatch.setattr(adding, name, getattr(adding, name).value)
        monkeypatch.setattr(adding, "_POLLS", polls)
        monkeypatch.setattr(adding, "_incomplete", adding._incomplete.fn)

        found: list[int] = []

        def atomic_add(word: None, added: int, sem: str) -> int:
            if not found:
                raise _Next(added)
            return found.pop(0)

        monkeypatch.setattr(adding, "tl", SimpleNamespace(atomic_add=atomic_add))

        def step(part: int, seen: Seen) -> tuple[int | None, int | None]:
            found[:] = seen
            try:
                return None, adding._duties.fn(None, part, parts)
            except _Next as next_one:
                return next_one.args[0], None

        return step

    return of


State = tuple[int, tuple[Seen, ...]]


def moved(state: State, step: Step) -> Iterator[tuple[int, State]]:
    """(program, what is after its next look) of each that is not through; checks those that are."""
    word, programs = state
    for part, seen in enumerate(programs):
        added, duties = step(part, seen)
        if added is not None:
            yield part, (word + added, (*programs[:part], (*seen, word), *programs[part + 1 :]))
        elif duties and not all(programs):
            pytest.fail("a program adds before all have stored their parts")


def check_end(state: State, step: Step, most: int) -> None:
    word, programs = state
    assert word == 0, "ready for the next launch"
    duties = [step(part, seen)[1] for part, seen in enumerate(programs)]
    assert sum(x for x in duties if x is not None) == (1 << len(programs)) - 1, "every piece is added"
    assert sum((x or 0).bit_count() for x in duties) == len(programs), "and once"
    assert max(map(len, programs)) <= most, "none waits for ever"


@pytest.mark.parametrize(
    ("parts", "polls"), [(2, 0), (2, 3), (3, 0), (3, 2), pytest.param(4, 1, marks=pytest.mark.full)]
)
def test_every_piece_is_added_once_in_every_order(step_of: Callable[[int, int], Step], parts: int, polls: int) -> None:
    step = step_of(parts, polls)
    waiting: list[State] = [(0, ((),) * parts)]
    known, ends = set(waiting), 0
    while waiting:
        state = waiting.pop()
        after = [next_one for _, next_one in moved(state, step)]
        if not after:
            check_end(state, step, polls + 3)
            ends += 1
        fresh = set(after) - known
        known |= fresh
        waiting += fresh
    assert ends > parts


@pytest.mark.parametrize("parts", [7, 8, 16])
def test_every_piece_is_added_once_in_orders_at_random(step_of: Callable[[int, int], Step], parts: int) -> None:
    step, orders = step_of(parts, 3), random.Random(0)
    gone = 0
    for _ in range(60):
        state: State = (0, ((),) * parts)
        # Some programs come much later than others
        late = {part: orders.random() ** 4 for part in range(parts)}
        while after := dict(moved(state, step)):
            chosen = orders.choices(list(after), [late[part] for part in after])[0]
            state = after[chosen]
        check_end(state, step, 6)
        gone += sum(step(part, seen)[1] == 0 for part, seen in enumerate(state[1]))
    assert gone > 60, "some did not wait for the last"
