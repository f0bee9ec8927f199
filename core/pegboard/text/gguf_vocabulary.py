"""Byte-level BPE tokenizers from GGUF metadata.

A GGUF file holds tokens, merges and the *name* of the pre-tokenizer; what the name stands for is set down here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pegboard.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4

#: Words as Llama 3 and Qwen 2 cut them; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    #: Cuts text into words; None: the byte level's own (GPT-2) pattern does.
    pattern: str | None = None
    #: Every digit is a word.
    single_digits: bool = False
    #: Text is composed (NFC) first.
    composed: bool = False
    #: A word that is a token needs no merges.
    ignore_merges: bool = False
    #: BOS is put before a text unless the file says otherwise.
    add_bos: bool = False


#: tokenizer.ggml.pre -> what it stands for.
PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": PreTokenizer(pattern=_WORDS.format(digits="{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizer(pattern=_WORDS.format(digits=""), composed=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        raise CheckpointError(
            "the GGUF file has a SentencePiece tokenizer (tokenizer.ggml.model 'llama'), which is not read from GGUF; "
            "use the model's safetensors folder with its tokenizer.json instead"
        )
    if kind != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level BPE)")
    name = metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise CheckpointError(f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(PRE_TOKENIZERS)}")
    tokens, types = _strings(metadata, "tokens"), metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type must hold one type for each of the {len(tokens)} tokens")
    backend = tokenizers.Tokenizer(_bpe(tokens, _strings(metadata, "merges"), pre))
    if pre.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splits(pre))
    backend.decoder = decoders.ByteLevel()
    added = [(t, kind) for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(t, special=kind == _CONTROL, normalized=False) for t, kind in added])
    template = _around(metadata, pre)
    if template is not None:
        backend.post_processor = template
    return backend


def gguf_token_text(metadata: Mapping[str, Any], role: str) -> str | None:
    """The token that tokenizer.ggml.<role>_token_id names; None if the file names none."""
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None
    tokens = _strings(metadata, "tokens")
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{key} is {token_id!r}; expected an id below {len(tokens)}")
    return tokens[token_id]


def _bpe(tokens: list[str], merges: list[str], pre: PreTokenizer) -> models.BPE:
    vocabulary = {token: place for place, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} repeated tokens")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        return models.BPE(vocabulary, pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error


def _splits(pre: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    if pre.pattern is not None:
        words = pre_tokenizers.Split(Regex(pre.pattern), "isolated")
        return [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [pre_tokenizers.Digits(individual_digits=True), byte_level] if pre.single_digits else [byte_level]


def _around(metadata: Mapping[str, Any], pre: PreTokenizer) -> processors.TemplateProcessing | None:
    """BOS before and EOS after a text, as the file wants it."""
    wants = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    specials: dict[str, tuple[str, int]] = {}
    for role, wanted in wants.items():
        token = gguf_token_text(metadata, role) if wanted else None
        if wanted and token is None:
            raise CheckpointError(f"tokenizer.ggml.add_{role}_token is set but the file names no {role}_token_id")
        if token is not None:
            specials[role] = (token, metadata[f"tokenizer.ggml.{role}_token_id"])
    if not specials:
        return None
    single = [specials["bos"][0]] if "bos" in specials else []
    single += ["$A"]
    single += [specials["eos"][0]] if "eos" in specials else []
    return processors.TemplateProcessing(single=single, special_tokens=sorted(set(specials.values())))


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"tokenizer.ggml.{key} is missing or is no array of strings")
    return value
