from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pegboard.errors import InvalidRequest
from pegboard.text import StopMatcher

EXAMPLES = 500 * (1 + 20 * int(os.environ.get("PEGBOARD_FULL", "0")))
#: Few letters, so that stop strings overlap and repeat.
LETTERS = st.text("ab", max_size=6)


def first_stop(text: str, stops: Sequence[str], unarmed: int) -> tuple[int, str] | None:
    """By the definition: the leftmost place, there the shortest, of those that end beyond the unarmed text."""
    found = [
        (at, len(stop), stop)
        for at in range(len(text))
        for stop in stops
        if text.startswith(stop, at) and at + len(stop) > unarmed
    ]
    return (min(found)[0], min(found)[2]) if found else None


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    parts=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    unarmed_parts=st.integers(0, 4),
)
@example(parts=["aab", "ab"], stops=["abab", "ba"], include=False, unarmed_parts=0)
@example(parts=["ab", "b"], stops=["ab", "bb"], include=True, unarmed_parts=1)
def test_equals_the_search_of_the_whole_text(
    parts: list[str], stops: list[str], include: bool, unarmed_parts: int
) -> None:
    matcher, shown, ended = StopMatcher(stops, include), "", False
    unarmed = sum(len(part) for part in parts[:unarmed_parts])
    for place, part in enumerate(parts):
        piece, ended = matcher.push(part, place >= unarmed_parts)
        shown += piece
        if ended:
            break
    shown += matcher.finish()
    text = "".join(parts)
    found = first_stop(text, stops, unarmed)
    if found is None:
        assert (shown, matcher.matched, ended) == (text, None, False)
    else:
        at, stop = found
        assert (shown, matcher.matched) == (text[: at + len(stop)] if include else text[:at], stop)


@settings(max_examples=EXAMPLES, deadline=None)
@given(parts=st.lists(LETTERS, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_holds_back_no_more_than_could_begin_a_stop(parts: list[str], stops: list[str]) -> None:
    matcher, text, shown = StopMatcher(stops), "", ""
    for part in parts:
        text += part
        piece, ended = matcher.push(part)
        shown += piece
        if ended or first_stop(text, stops, 0):
            break
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert shown == text[: len(text) - held]


def test_across_pieces() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == ("Hello", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("e no") == ("\n\nUse no", False)
    assert matcher.push("\n\nUser: more") == ("", True)
    assert matcher.matched == "\n\nUser:"
    assert matcher.push("late") == ("", True)
    assert matcher.finish() == ""


def test_the_stop_can_be_shown() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.push("D.") == ("END", True)


def test_text_before_min_tokens_does_not_end_anything_but_may_begin_it() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop b st", armed=False) == ("a stop b ", False)
    assert matcher.push("op") == ("", True)


def test_one_that_began_further_left_is_waited_for() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == ("x", False)
    assert matcher.push("d") == ("", True)
    assert matcher.matched == "abcd"
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == ("x", False)
    assert matcher.finish() == "a"
    assert matcher.matched == "bc"


def test_no_stops_hold_nothing_back() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [3]])
def test_stops_that_are_refused(stops: Sequence[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop must be a list of strings"):
        StopMatcher(stops)
