"""What a target is asked so that its heads see how it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..errors import ConfigError
from ..text import Tokenizer, encode_chat

_ASKS: Final = (
    "Explain {} to a child.",
    "What is the most important thing to know about {}?",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Write an e-mail to a colleague about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me a step-by-step plan for learning about {}.",
    "Write a poem about {}.",
    "Summarize what you know about {} in three sentences.",
    "Ask me three questions about {} and answer them.",
)
_TOPICS: Final = (
    "gravity", "bread", "the ocean", "Python programming", "bicycles", "the Roman Empire", "chess", "volcanoes",
    "coffee", "photosynthesis", "electric cars", "honey bees", "the moon", "money", "libraries", "the human heart",
    "gardening", "jazz music", "bridges", "dinosaurs", "sleep", "democracy", "football", "black holes",
    "trains", "recycling", "painting", "vaccines", "mountains", "friendship",
)  # fmt: skip
#: Has no divisor in common with their number.
_STRIDE: Final = 127


def built_in() -> list[str]:
    """Every ask of every topic, mixed."""
    pairs = [(ask, topic) for topic in _TOPICS for ask in _ASKS]
    mixed = [pairs[place * _STRIDE % len(pairs)] for place in range(len(pairs))]
    return [ask.format(topic) for ask, topic in mixed]


def read_lines(file: Path) -> list[str]:
    """One prompt a line. ConfigError: there is none."""
    found = [line.strip() for line in _text(file).splitlines() if line.strip()]
    if not found:
        raise ConfigError(f"{file} has no prompt: write one a line")
    return found


def encode(prompts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """As messages of a user where the model has a chat template, else as they are."""
    if tokenizer.chat_template is not None:
        return [list(encode_chat(tokenizer, [{"role": "user", "content": prompt}])) for prompt in prompts]
    return [list(tokenizer.encode(prompt)) for prompt in prompts]


def read_pieces(file: Path, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """The ids of a text, cut into pieces. ConfigError: there are too few."""
    ids = list(tokenizer.encode(_text(file), add_special=False))
    pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(pieces) < 2:
        raise ConfigError(f"{file} has {len(ids)} tokens, two pieces of {length} are needed at least: shorten them")
    return pieces


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
