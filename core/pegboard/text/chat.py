"""Chat templates: jinja programs that come with a model, run in a sandbox.

The rendered text already holds the special tokens (BOS too, where the model wants one): encode it with
`encode(text, add_special=False, allow_special=True)`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pegboard.errors import CheckpointError, InvalidRequest

#: A render may go round its loops this often, and write this many characters. Real templates stay far below; a
#: broken one ends with an error instead of hanging the process.
_MAX_ITERATIONS: Final = 1_000_000
_MAX_CHARACTERS: Final = 16_000_000

#: A template that looks at what a part of a content is.
_KNOWS_PARTS: Final = re.compile(r"""\[['"]type['"]\]|\.type\b|\bcontent(?:['"]\])?\s*(?:\[|is\s)""")

_BUDGET: Final = "_pegboard_iterations_left"


class _Refused(jinja2.TemplateError):
    """The template itself called raise_exception."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> str:
    """The conversation as the model was trained to see it; `extra` are further variables of the template.

    InvalidRequest: messages of the wrong form, or that the template refuses (with its own words) or fails on.
    CheckpointError: a template that is not valid jinja, leaves its sandbox, or does not end.
    """
    variables: dict[str, Any] = dict(extra, messages=prepared(template, messages), tools=tools)
    variables["add_generation_prompt"] = add_generation_prompt
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    variables |= {name: token for name, token in tokens.items() if token is not None}
    compiled = _compile(template)
    variables[_BUDGET] = [_MAX_ITERATIONS]
    try:
        return _bounded(compiled.generate(variables))
    except _Refused as error:
        raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
    except (SecurityError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"the chat template is not safe to run: {error or type(error).__name__}") from error
    except Exception as error:  # a template can fail in any way that an expression can
        raise InvalidRequest(f"the chat template failed on these messages: {error} ({type(error).__name__})") from error


def prepared(template: str, messages: Any) -> list[Mapping[str, Any]]:
    """Messages as the template takes them: for one that knows no parts of a content, texts of parts are one text, and
    no content, beside tool calls, is an empty one. InvalidRequest: messages of the wrong form."""
    checked = _checked(messages)
    if _KNOWS_PARTS.search(template):
        return checked
    return [
        message if isinstance(message.get("content"), str) else {**message, "content": _text_of(place, message)}
        for place, message in enumerate(checked)
    ]


def _text_of(place: int, message: Mapping[str, Any]) -> str:
    texts = []
    for part in message.get("content") or ():
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"messages[{place}] has a part of type {part.get('type')!r}; this model's chat template takes texts: "
                "{'type': 'text', 'text': ...}"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _checked(messages: Any) -> list[Mapping[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages must be a list of {role, content}, with one message at least")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where} is a {type(message).__name__}; expected {{role, content}}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{where} has no role; expected a string such as 'user'")
        parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
        calls = content is None and bool(message.get("tool_calls"))
        if not (isinstance(content, str) or parts or calls):
            raise InvalidRequest(f"{where} has content of type {type(content).__name__}; expected a string")
    return list(messages)


def _bounded(pieces: Iterable[str]) -> str:
    kept, size = [], 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size > _MAX_CHARACTERS:
            raise SecurityError(f"it writes more than {_MAX_CHARACTERS} characters")
    return "".join(kept)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise CheckpointError(f"the chat template is not valid{line}: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters[_BUDGET] = _counted
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Every loop counts down the render's budget."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _BUDGET, [], [], None, None, lineno=loop.lineno)
        return tree


class _Generation(Extension):
    """{% generation %} marks what an assistant wrote, for training; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    left = context[_BUDGET]
    for item in items:
        left[0] -= 1
        if left[0] < 0:
            raise SecurityError(f"its loops go round more than {_MAX_ITERATIONS} times")
        yield item


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: a prompt is no HTML, so nothing is escaped for it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
