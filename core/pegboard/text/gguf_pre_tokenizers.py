"""What the names of pre-tokenizers in GGUF files (tokenizer.ggml.pre) stand for: how text is cut into words before the
byte-level BPE. The patterns are those of the models' published tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from tokenizers import Regex, pre_tokenizers

#: Words as Llama 3 and Qwen 2 cut them; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Words as Mistral's Tekken cuts them: a capital begins one.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")


class PreTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    #: Cut text into words, one after the other; none: the byte level's own (GPT-2) pattern does.
    patterns: tuple[str, ...] = ()
    #: Every digit is a word.
    single_digits: bool = False
    #: Text is composed (NFC) first.
    composed: bool = False
    #: A word that is a token needs no merges.
    ignore_merges: bool = False
    #: BOS is put before a text unless the file says otherwise.
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)]
        )


_LLAMA3 = PreTokenizer(patterns=(_WORDS.format(digits="{1,3}"),), ignore_merges=True, add_bos=True)
_DIGITS = PreTokenizer(single_digits=True)

#: tokenizer.ggml.pre -> what it stands for.
PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "gpt-2": PreTokenizer(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(patterns=(_WORDS.format(digits=""),), composed=True),
    "deepseek-r1-qwen": PreTokenizer(patterns=(_WORDS.format(digits=""),)),
    "deepseek-coder": PreTokenizer(patterns=_DEEPSEEK_CODER, single_digits=True),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
}
