"""Small tokenizers of the kinds that models come with, made by the tokenizers library."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pegboard.contracts.checkpoint import TokenizerFiles
from pegboard.text import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it?",
    "def f(x):\n    return x ** 2  # square\n\n\nprint(f(12345))",
    "한국어 문장과 日本語の文 и русский текст, à côté d'été.",
    "👩‍👩‍👧‍👦 family 😀😃 é ñ",
] * 3
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_tokens(["<tool call>", "été"])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: words marked by a leading ▁, unknown characters as bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3, "é à の"], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"], "�"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in trained["merges"]]
    tokenizer.model = models.BPE(
        {piece: place for place, piece in enumerate(pieces)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


@functools.cache
def made(kind: str) -> str:
    return KINDS[kind]().to_str()


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """(kind, **tokenizer_config) -> Tokenizer, by way of a tokenizer.json."""

    def make(kind: str, **config: object) -> Tokenizer:
        path: Path = tmp_path_factory.mktemp(kind) / "tokenizer.json"
        path.write_text(made(kind), encoding="utf-8")
        return load_tokenizer(TokenizerFiles(tokenizer_json=path, config=config))

    return make
