"""From a conversation to token ids. What people wrote can't speak for the template: a special token's name inside a
message stays text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import InvalidRequest

from .chat import prepared, render_chat
from .tokenizer import Tokenizer

#: Stand for the n-th special name that was found in a message: private-use characters, which templates pass on.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


def render_prompt(
    tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
) -> str:
    """The template's text; `variables` are further ones of the template. InvalidRequest when the model has no template,
    or it refuses the messages."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise InvalidRequest("this model has no chat template: use generate with a prompt of your own")
    known = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    return render_chat(tokenizer.chat_template, messages, **{**known, **_checked(variables)})


def encode_chat(
    tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of the rendered conversation: special tokens of the template and its variables, plain text of the
    messages."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise InvalidRequest("this model has no chat template: use generate with a prompt of your own")
    names = [name for id in tokenizer.special_ids if (name := tokenizer.backend.id_to_token(id))]
    found: list[str] = []

    def stand_in(match: re.Match[str]) -> str:
        found.append(match[0])
        return f"{_OPEN}{len(found) - 1}{_CLOSE}"

    special = re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or r"(?!)")

    def safe(content: Any) -> Any:
        if isinstance(content, str):
            return special.sub(stand_in, content)
        if isinstance(content, list):
            return [{**part, "text": safe(part["text"])} if "text" in part else part for part in content]
        return content

    told = [
        {**message, "content": safe(message["content"])} if "content" in message else message
        for message in prepared(tokenizer.chat_template, messages)
    ]
    text = render_prompt(tokenizer, told, variables)
    if not found:
        return tokenizer.encode(text, add_special=False, allow_special=True)
    ids: list[int] = []
    for place, piece in enumerate(re.split(f"{_OPEN}([0-9]+){_CLOSE}", text)):
        if place % 2:
            ids += tokenizer.encode(found[int(piece)], add_special=False)
        elif piece:
            ids += tokenizer.encode(piece, add_special=False, allow_special=True)
    return ids


def _checked(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequest(
            f"template is {variables!r:.100}, must map names of the chat template's variables to values"
        )
    own = [name for name in ("messages", "template") if name in variables]
    if own:
        raise InvalidRequest(f"template can't set {' and '.join(own)}: the conversation and the model say that")
    return variables
