"""Tokenizers of folders without a tokenizer.json: loaded from vocab.json and merges.txt where the tokenizer's class
leaves no doubt what they mean, refused with what to do about it otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from pegboard.contracts.checkpoint import TokenizerFiles
from pegboard.errors import CheckpointError

from .gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

#: `tokenizer_class` of tokenizer_config.json, without "Fast" -> how it cuts words.
_CLASSES: Final[Mapping[str, PreTokenizer]] = {
    "GPT2Tokenizer": PRE_TOKENIZERS["gpt-2"],
    "Qwen2Tokenizer": PRE_TOKENIZERS["qwen2"],
}
#: Options of those classes that would change the ids, and the value that changes nothing.
_PLAIN: Final = ("add_prefix_space", "add_bos_token", "add_eos_token")


def why_not_vocabulary(files: TokenizerFiles) -> str | None:
    """Why vocab.json and merges.txt can't be the tokenizer; None: they can."""
    if files.vocabulary is None:
        return "there is no vocab.json with a merges.txt"
    named = files.config.get("tokenizer_class")
    if not isinstance(named, str) or named.removesuffix("Fast") not in _CLASSES:
        return (
            f"vocab.json and merges.txt are read where tokenizer_config.json names the tokenizer_class "
            f"{' or '.join(_CLASSES)}, not {named!r}"
        )
    changed = [key for key in _PLAIN if files.config.get(key)]
    return f"vocab.json and merges.txt are not read with {', '.join(changed)}" if changed else None


def no_tokenizer(files: TokenizerFiles) -> str:
    """What is missing and what to do, when nothing of `files` can be read."""
    paths = [*(files.vocabulary or ()), *files.unread]
    if not paths:
        return (
            "the model has no tokenizer.json and no tokenizer of another form: put tokenizer.json and "
            "tokenizer_config.json of the model into its folder, or give prompts as token ids"
        )
    folder = str(paths[0].parent)
    reason = f": {why_not_vocabulary(files)}" if files.vocabulary is not None else ""
    return (
        f"the model has no tokenizer.json, only {', '.join(path.name for path in paths)}{reason}; write one with "
        f"transformers: AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r}), or give prompts as "
        "token ids"
    )


def tokenizer_from_vocabulary(vocabulary: tuple[Path, Path], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE from (vocab.json, merges.txt); special and added tokens from `added_tokens_decoder`."""
    pre = _CLASSES[config["tokenizer_class"].removesuffix("Fast")]
    names = [str(path) for path in vocabulary]
    try:
        backend = tokenizers.Tokenizer(models.BPE(*models.BPE.read_file(*names)))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{' and '.join(names)} are not a vocabulary that can be read: {error}") from error
    if pre.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    for token_id, token in sorted(_added(vocabulary[0], config.get("added_tokens_decoder") or {}).items()):
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"added_tokens_decoder beside {vocabulary[0]} gives {token.content!r} the id {token_id}; with this "
                f"vocabulary it is {backend.token_to_id(token.content)}"
            )
    return backend


def _added(path: Path, described: Any) -> dict[int, AddedToken]:
    fields = ("special", "single_word", "lstrip", "rstrip", "normalized")
    try:
        return {
            int(token_id): AddedToken(token["content"], **{key: token[key] for key in fields if key in token})
            for token_id, token in described.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"added_tokens_decoder beside {path} is damaged: {error!r}") from error
