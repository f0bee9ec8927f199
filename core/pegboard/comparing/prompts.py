"""What is compared on when nothing is given, and prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Final

from ..errors import ConfigError
from ..request import Prompt

BUILT_IN: Final = (
    "The capital of France is",
    "Once upon a time there was a small village where",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees. In winter it",
)


def default_prompts(texts: bool, vocabulary: int) -> list[Prompt]:
    """The built-in texts, or ids of a fixed seed for a model without a tokenizer."""
    if texts:
        return list(BUILT_IN)
    random = Random(0)
    return [[random.randrange(vocabulary) for _ in range(length)] for length in (5, 12, 33)]


def read_prompts(path: Path) -> list[Prompt]:
    """One a line; a line that begins with "[" is a JSON list of token ids. ConfigError: no such file, or bad ids."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts {path}: {error}") from None
    found = [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ConfigError(f"prompts {path}: there is none in it; write one a line")
    return found


def _prompt(line: str, where: str) -> Prompt:
    return parse_ids(line, where) if line.startswith("[") else line


def parse_ids(text: str, where: str) -> list[int]:
    """Token ids of "[1, 2]" or "1,2". ConfigError, naming `where`."""
    try:
        ids = json.loads(text if text.startswith("[") else f"[{text}]")
    except json.JSONDecodeError:
        ids = None
    if not isinstance(ids, list) or not ids or not all(type(id) is int for id in ids):
        raise ConfigError(f"{where}: {text!r:.60} is no list of token ids; write e.g. 1,17,42")
    return ids
