"""Tokenizers: text to ids and back, from a fast tokenizer.json, the metadata of a GGUF file, or vocab.json and
merges.txt.

Text is decoded as the tokenizer's own decoder gives it; no spaces are tidied up afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pegboard.contracts.checkpoint import TokenizerFiles
from pegboard.errors import CheckpointError

from .byte_level import ByteTokens
from .gguf_vocabulary import gguf_token_text, tokenizer_from_gguf
from .vocabulary_files import no_tokenizer, tokenizer_from_vocabulary, why_not_vocabulary

_DEFAULT_TEMPLATE = "default"


class Tokenizer:
    """Safe to use from several threads. `backend` is the `tokenizers` object; it must not be changed."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        #: Name -> jinja source.
        self.chat_templates: Mapping[str, str] = dict(chat_templates or {})
        self.bos_id = self._id_of("bos", bos_token)
        self.eos_id = self._id_of("eos", eos_token)
        #: Highest id + 1, added tokens included.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._anchor = next(iter(backend.encode("a", add_special_tokens=False).ids), None)

    @cached_property
    def byte_tokens(self) -> ByteTokens | None:
        """The bytes of each token, of byte-level BPE."""
        return ByteTokens.of(self.backend)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A twin that reads special tokens as plain text: the setting belongs to the object, and is no argument.
        Made when it is first needed, for it takes as long as loading does."""
        if not self.special_ids:
            return self.backend
        twin = tokenizers.Tokenizer.from_str(self.backend.to_str())
        twin.encode_special_tokens = True
        return twin

    @property
    def chat_template(self) -> str | None:
        """The default template; None if there is none."""
        return self.chat_templates.get(_DEFAULT_TEMPLATE)

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = False) -> list[int]:
        """Ids of `text`. `add_special` puts the tokenizer's own BOS (and EOS) around it, if it has such a rule.

        A special token's name in the text, "<|im_end|>" say, is plain text, so that a user's text cannot speak for
        the system; with `allow_special` it becomes the token, as a rendered chat template needs (and then
        `add_special` should be off: a template writes its own BOS).
        """
        backend = self.backend if allow_special else self._plain
        ids: list[int] = backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Bytes that are not UTF-8 come out as U+FFFD; ids that the tokenizer does not have are left out."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_text(self, id: int) -> str:
        """The text of one token inside a text, its leading space kept; "" for an id that does not exist."""
        if self._anchor is None:
            return self.decode([id], skip_special=False)
        alone = self.decode([self._anchor], skip_special=False)
        return self.decode([self._anchor, id], skip_special=False).removeprefix(alone)

    def _id_of(self, role: str, token: str | None) -> int | None:
        if token is None:
            return None
        token_id: int | None = self.backend.token_to_id(token)
        if token_id is None:
            raise CheckpointError(f"the tokenizer's {role} token {token!r} is not in its vocabulary")
        return token_id


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """CheckpointError if there is no tokenizer (with what to do), or if it is damaged or of a kind that is not read."""
    if files.gguf is not None:
        return _from_gguf(files.gguf)
    if files.tokenizer_json is not None:
        return _from_folder(_read(files.tokenizer_json), files.tokenizer_json, files.config)
    if files.vocabulary is not None and why_not_vocabulary(files) is None:
        backend = tokenizer_from_vocabulary(files.vocabulary, files.config)
        return _from_folder(backend, files.vocabulary[0], files.config)
    raise CheckpointError(no_tokenizer(files))


def has_tokenizer(files: TokenizerFiles) -> bool:
    """Whether there is one of a kind that is read."""
    return files.tokenizer_json is not None or files.gguf is not None or why_not_vocabulary(files) is None


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}") from error
    # A file may carry the padding and truncation of its training.
    backend.no_padding()
    backend.no_truncation()
    return backend


def _from_folder(backend: tokenizers.Tokenizer, path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """With the tokens and templates that tokenizer_config.json names."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    named = {name: _token_of(path, name, config.get(name)) for name in names}
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [t for t in named.values() if t and t not in known and backend.token_to_id(t) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in missing])
    return Tokenizer(
        backend,
        bos_token=named["bos_token"],
        eos_token=named["eos_token"],
        chat_templates=_templates(path, config.get("chat_template")),
    )


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    prefix = "tokenizer.chat_template"
    templates = {key.removeprefix(f"{prefix}."): metadata[key] for key in metadata if key.startswith(f"{prefix}.")}
    if prefix in metadata:
        templates[_DEFAULT_TEMPLATE] = metadata[prefix]
    return Tokenizer(
        tokenizer_from_gguf(metadata),
        bos_token=gguf_token_text(metadata, "bos"),
        eos_token=gguf_token_text(metadata, "eos"),
        chat_templates={name: text for name, text in templates.items() if isinstance(text, str)},
    )


def _token_of(path: Path, name: str, value: Any) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with its `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{name} beside {path} is {value!r}; expected a string")
    return value


def _templates(path: Path, value: Any) -> dict[str, str]:
    """`chat_template`: one source, or a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT_TEMPLATE: value}
    entries = value if isinstance(value, list) else [value]
    if not all(
        isinstance(e, Mapping) and isinstance(e.get("name"), str) and isinstance(e.get("template"), str)
        for e in entries
    ):
        raise CheckpointError(f"chat_template beside {path} is neither a string nor a list of {{name, template}}")
    return {entry["name"]: entry["template"] for entry in entries}
