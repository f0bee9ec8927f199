"""Tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama").

A GGUF file holds tokens, merges or scores, and the *name* of the pre-tokenizer (`gguf_pre_tokenizers`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from pegboard.errors import CheckpointError

from .gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from .sentencepiece_bpe import sentencepiece_bpe

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """CheckpointError: a kind that is not read, naming those that are, or a vocabulary that is none."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE)"
        )
    tokens = _strings(metadata, "tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens has {len(tokens) - len(set(tokens))} repeated tokens")
    types = _types(metadata, len(tokens), required=kind == "llama")
    scores = _scores(metadata, len(tokens)) if kind == "llama" else []
    count = _unpadded(tokens, types)
    tokens, types = tokens[:count], types[:count]
    special: tuple[int, ...]
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata)
        backend, special, add_bos = _byte_level(metadata, tokens, pre), (_CONTROL,), pre.add_bos
    else:
        backend, special, add_bos = _sentencepiece(metadata, tokens, types, scores), (_CONTROL, _UNKNOWN), True
    added = [(t, kind) for t, kind in zip(tokens, types, strict=True) if kind in (*special, _USER_DEFINED)]
    backend.add_tokens([AddedToken(t, special=kind in special, normalized=False) for t, kind in added])
    template = _around(metadata, add_bos)
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


def _unpadded(tokens: list[str], types: list[int]) -> int:
    """Tokens without those at the end that only fill up the rows of the model's head: no text is made of them, so they
    must not be chosen."""
    count = len(tokens)
    while count and types[count - 1] == _UNUSED and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    return count


def _types(metadata: Mapping[str, Any], count: int, *, required: bool) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None and not required:
        return [1] * count
    if not isinstance(types, list) or len(types) != count:
        raise CheckpointError(f"tokenizer.ggml.token_type must hold one type for each of the {count} tokens")
    return types


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(PRE_TOKENIZERS)}; for another one use the model's "
            "safetensors folder with its tokenizer.json"
        )
    return pre


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    vocabulary = {token: place for place, token in enumerate(tokens)}
    pairs = []
    for merge in _strings(metadata, "merges"):
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    if pre.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != count
        or not all(type(score) is float and math.isfinite(score) for score in scores)
    ):
        raise CheckpointError(f"tokenizer.ggml.scores must hold one number for each of the {count} tokens")
    return scores


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], scores: list[float]
) -> tokenizers.Tokenizer:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise CheckpointError(f"tokenizer.ggml.{key} with tokenizer.ggml.model 'llama' is not supported")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if type(prefix) is not bool:
        raise CheckpointError(f"tokenizer.ggml.add_space_prefix is {prefix!r}; expected true or false")
    unknown = gguf_token_text(metadata, "unknown")
    if unknown is None and _UNKNOWN in types:
        unknown = tokens[types.index(_UNKNOWN)]
    return sentencepiece_bpe(tokens, scores, types, unknown=unknown, space_prefix=prefix)


def _around(metadata: Mapping[str, Any], add_bos: bool) -> processors.TemplateProcessing | None:
    """BOS before and EOS after a text, as the file wants it."""
    wants = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
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
