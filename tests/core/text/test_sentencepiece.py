"""SentencePiece vocabularies in GGUF metadata, held against the SentencePiece library itself."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.contracts.checkpoint import TokenizerFiles
from pegboard.errors import CheckpointError
from pegboard.text import IncrementalDetokenizer, Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it?",
    "def f(x):\n    return x ** 2  # square\n\n\nprint(f(12345))",
    "  leading spaces, and    runs of them  ",
    "한국어 문장과 日本語の文 и русский текст, à côté d'été.",
    "the then there these those this that they them",
] * 5
TEXTS = [
    "",
    " ",
    "   ",
    "The quick brown fox",
    "  leading and trailing  ",
    "line\n\n\ttabs\r\n",
    "It's 12345 o'clock, isn't it? I'LL",
    "한국어 日本語 текст été e\u0301",
    "👩‍👩‍👧‍👦😀 unknown characters ∮ \U0010ffff",
    "\x00\x7f\u200b\ufeff\ufffd",
    "<0x41> <s> is text",
    "thethethethere  then",
    "▁ the sign itself ▁▁",
]

Model = tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]


@functools.cache
def train(prefix: bool, byte_fallback: bool, users: tuple[str, ...]) -> Model:
    """The library's own model, and what the format's converter would write of it."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        model_type="bpe",
        vocab_size=512 if byte_fallback else 256,
        byte_fallback=byte_fallback,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=list(users),
        control_symbols=["<turn>"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    ids = range(processor.get_piece_size())

    def kind(i: int) -> int:
        piece = processor.id_to_piece(i)
        if processor.is_unknown(i):
            return 2
        if processor.is_control(i):
            return 3
        if piece in users:
            return 4
        return 6 if processor.is_byte(i) else 1

    # The converter writes the spaces of pieces that a user defined as they are in text.
    pieces = [p.replace("▁", " ") if kind(i) == 4 else p for i, p in ((i, processor.id_to_piece(i)) for i in ids)]
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": pieces,
        "scores": [processor.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
        "add_space_prefix": prefix,
        "add_bos_token": True,
    }
    return processor, {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


KINDS: dict[str, Callable[[], Model]] = {
    "llama": lambda: train(True, True, ()),
    "gemma": lambda: train(False, True, ("\n\n", "▁▁", "▁▁▁▁", "<unused0>")),
    "no bytes": lambda: train(True, False, ()),
}


@pytest.fixture(scope="module", params=list(KINDS))
def made(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    processor, metadata = KINDS[request.param]()
    return processor, load_tokenizer(TokenizerFiles(gguf=metadata))


def has_users(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Pieces of a user's are found in the text as it is written, where U+2581 is no space, as by the format's reference
    implementation; the library finds them after spaces became U+2581."""
    return processor.piece_to_id("<unused0>") != processor.unk_id()


def agree(processor: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer, text: str) -> None:
    wanted = processor.encode(text)
    assert tokenizer.encode(text, add_special=False) == wanted
    assert tokenizer.encode(text) == [processor.bos_id(), *wanted]
    assert tokenizer.decode(wanted, skip_special=False) == processor.decode(wanted).replace(" ⁇ ", "<unk>")


@pytest.mark.supports("Files", "SentencePiece tokenizers in GGUF")
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts(made: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str) -> None:
    if has_users(made[0]) and "▁" in text:
        pytest.skip("see has_users")
    agree(*made, text)


@settings(max_examples=200 * (1 + 20 * int(os.environ.get("PEGBOARD_FULL", "0"))), deadline=None)
@given(text=st.text(st.sampled_from(" \n\taehtisn12'.,é語한😀∮▁"), max_size=40) | st.text(max_size=20))
def test_any_text(made: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str) -> None:
    processor, tokenizer = made
    if has_users(processor):
        text = text.replace("▁", "")
    assert tokenizer.encode(text, add_special=False) == processor.encode(text)


def test_special_tokens(made: tuple[sentencepiece.SentencePieceProcessor, Tokenizer]) -> None:
    processor, tokenizer = made
    turn, eos, unknown = (processor.piece_to_id(piece) for piece in ("<turn>", "</s>", "<unk>"))
    assert tokenizer.special_ids == {processor.bos_id(), eos, turn, unknown}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, eos, processor.get_piece_size())
    ids = tokenizer.encode("<turn>the</s>", add_special=False, allow_special=True)
    assert ids == [turn, *processor.encode("the"), eos]
    assert turn not in tokenizer.encode("<turn>the", add_special=False)
    assert tokenizer.decode(ids) == "the"


def test_pieces_streamed_are_the_text(made: tuple[sentencepiece.SentencePieceProcessor, Tokenizer]) -> None:
    processor, tokenizer = made
    for text in TEXTS:
        ids, stream = processor.encode(text), IncrementalDetokenizer(tokenizer, skip_special=False)
        pieces = [stream.push([i]) for i in ids]
        assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids, skip_special=False)


def test_what_follows_a_special_token_has_the_prefix_too() -> None:
    """As the format's reference implementation does, and Llama 2's own fast tokenizer."""
    processor, metadata = KINDS["llama"]()
    tokenizer = load_tokenizer(TokenizerFiles(gguf=metadata))
    turn = processor.piece_to_id("<turn>")
    parts = [processor.encode(text) for text in ("the fox", "jumps")]
    ids = tokenizer.encode("the fox<turn>jumps", add_special=False, allow_special=True)
    assert ids == [*parts[0], turn, *parts[1]]


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({}, (True, False)),
        ({"add_bos_token": None}, (True, False)),
        ({"add_bos_token": False}, (False, False)),
        ({"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_what_goes_around_a_text(changes: dict[str, Any], around: tuple[bool, bool]) -> None:
    processor, metadata = KINDS["llama"]()
    metadata = metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    tokenizer = load_tokenizer(TokenizerFiles(gguf={k: v for k, v in metadata.items() if v is not None}))
    bos, eos = [processor.bos_id()] * around[0], [processor.eos_id()] * around[1]
    assert tokenizer.encode("the fox") == [*bos, *processor.encode("the fox"), *eos]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores must hold one number"),
        ({"scores": [0.0]}, "scores must hold one number"),
        ({"token_type": None}, "token_type must hold one type"),
        ({"token_type": [6] * 512}, "512 byte tokens"),
        ({"tokens": ["a"] * 512}, "511 repeated tokens"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces .* not supported"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1"),
        ({"unknown_token_id": 512}, "unknown_token_id is 512"),
        ({"bos_token_id": None}, "names no bos_token_id"),
        ({"model": "t5"}, r"'t5'; supported: 'gpt2' \(byte-level BPE\), 'llama' \(SentencePiece BPE\)"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    metadata = KINDS["llama"]()[1] | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(TokenizerFiles(gguf={k: v for k, v in metadata.items() if v is not None}))
