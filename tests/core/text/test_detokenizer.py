from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.text import IncrementalDetokenizer, Tokenizer

Make = Callable[..., Tokenizer]
KINDS = ["byte_level", "byte_fallback", "metaspace"]
EXAMPLES = 200 * (1 + 20 * int(os.environ.get("PEGBOARD_FULL", "0")))


def pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    """The stream's pieces when ids arrive `sizes` at a time (one by one once these are used up)."""
    stream = IncrementalDetokenizer(tokenizer, skip_special=skip)
    found, at = [], 0
    while at < len(ids):
        size = sizes.pop() if sizes else 1
        found.append(stream.push(ids[at : at + size]))
        at += size
    return [*found, stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_in_any_pieces_join_to_the_whole_text(make_tokenizer: Make, kind: str) -> None:
    tokenizer = make_tokenizer(kind)

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(
        ids=st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40),
        sizes=st.lists(st.integers(0, 5), max_size=20),
        skip=st.booleans(),
    )
    def check(ids: list[int], sizes: list[int], skip: bool) -> None:
        assert "".join(pieces(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip_special=skip)

    check()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_of_any_text_and_bytes_of_none(make_tokenizer: Make, kind: str) -> None:
    """Runs of single bytes: characters cut anywhere, between real words."""
    tokenizer = make_tokenizer(kind)
    first = tokenizer.backend.token_to_id("<0x00>")
    words = tokenizer.encode(" the quick", add_special=False)

    def as_ids(part: bytes | str) -> list[int]:
        if isinstance(part, str):
            return words
        if first is not None:
            return [first + byte for byte in part]
        return [tokenizer.backend.token_to_id(chr(c)) for c in (BYTES[byte] for byte in part)]

    part = st.one_of(st.binary(max_size=6), st.text(max_size=4).map(str.encode), st.just(" the quick"))

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(parts=st.lists(part, max_size=8))
    def check(parts: list[bytes | str]) -> None:
        ids = [i for p in parts for i in as_ids(p)]
        assert "".join(pieces(tokenizer, ids, [], True)) == tokenizer.decode(ids)

    check()


#: Byte -> its character in byte-level vocabularies, by the definition of GPT-2.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {byte: byte for byte in PRINTABLE} | {byte: 256 + place for place, byte in enumerate(OTHERS)}


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["한국어 문장", "👩‍👩‍👧‍👦 ok 😀", "e\u0301a\u0308", "€ and \U00020000"])
def test_no_replacement_character_while_one_is_incomplete(make_tokenizer: Make, kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(text, add_special=False)
    assert len(ids) > len(text.split())
    streamed = pieces(tokenizer, ids, [], True)
    assert "\ufffd" not in "".join(streamed)
    shown = ""
    for piece in streamed:
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def test_characters_come_as_soon_as_they_are_complete(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("byte_level")
    ids = [tokenizer.backend.token_to_id(chr(BYTES[byte])) for byte in "€x".encode()]
    assert pieces(tokenizer, ids, [], True) == ["", "", "€", "x", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_that_are_no_text_come_out_in_the_end(make_tokenizer: Make, kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    names = {"byte_level": [chr(BYTES[0xE2]), "a"], "byte_fallback": ["<0xE2>", "a"]}[kind]
    bad, letter = (tokenizer.backend.token_to_id(name) for name in names)
    assert pieces(tokenizer, [letter, bad, letter], [], True) == ["a", "", "\ufffda", ""]
    assert pieces(tokenizer, [letter, bad], [], True) == ["a", "", "\ufffd"]


def test_the_leading_space_goes_once_and_specials_do_not_bring_that_back(make_tokenizer: Make) -> None:
    for kind in ("byte_fallback", "metaspace"):
        tokenizer = make_tokenizer(kind)
        quick, end = tokenizer.encode("the quick", add_special=False), tokenizer.backend.token_to_id("</s>")
        ids = [*quick, end, end, *quick, end, *quick]
        assert "".join(pieces(tokenizer, ids, [], True)) == tokenizer.decode(ids) == "the quick the quick the quick"


@pytest.mark.parametrize("kind", KINDS)
def test_work_per_token_does_not_grow(make_tokenizer: Make, kind: str) -> None:
    """A long run of bytes, the worst case for a decoder of windows, costs about what the first part of it does."""
    tokenizer = make_tokenizer(kind)
    names = {"byte_level": chr(BYTES[0x80]), "byte_fallback": "<0x80>", "metaspace": "▁"}
    stream = IncrementalDetokenizer(tokenizer)
    ids = [tokenizer.backend.token_to_id(names[kind])] * 2000

    def measure() -> float:
        begin = time.process_time()
        for i in ids:
            stream.push([i])
        return time.process_time() - begin

    times = [measure() for _ in range(10)]
    assert min(times[-3:]) < 5 * max(min(times[:3]), 1e-3)
