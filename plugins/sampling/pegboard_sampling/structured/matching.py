"""One text and the grammar that it follows, by llguidance (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from llguidance import LLMatcher, LLTokenizer, grammar_from
from torch import Tensor

from pegboard.errors import InvalidRequest, PegboardError

from .arguments import Arguments


def compile_grammar(arguments: Arguments, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of a text. InvalidRequest, with the library's reason: there is none."""
    try:
        source = _source(arguments)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{_kind(arguments)}: {error}") from error
    matcher = LLMatcher(tokenizer, source, log_level=0)
    if matcher.is_error():
        raise InvalidRequest(f"{_kind(arguments)}: {_reason(matcher)}")
    return matcher


def _source(arguments: Arguments) -> str:
    if arguments.regex is not None:
        return LLMatcher.grammar_from_regex(arguments.regex)
    if arguments.grammar is not None:
        return grammar_from("grammar", arguments.grammar)
    schema = arguments.json_schema
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if arguments.whitespace:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": True})
    return LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )


def _kind(arguments: Arguments) -> str:
    return next(name for name in ("json_schema", "regex", "grammar") if getattr(arguments, name) is not None)


def _reason(matcher: LLMatcher) -> str:
    """Without the dump of the parser's state that follows it."""
    return matcher.get_error().partition("\n<state>")[0].strip()


class Text:
    """A text so far. Not safe from several threads."""

    def __init__(self, matcher: LLMatcher, eos_ids: Set[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        #: An EOS was taken: nothing follows.
        self._over = False

    def accept(self, tokens: Sequence[int]) -> None:
        """PegboardError: the grammar does not allow them."""
        taken = self._take(tokens)
        if taken < len(tokens):
            raise PegboardError(f"token {tokens[taken]} does not follow the grammar here")

    def fill(self, masks: Tensor, drafts: Sequence[int]) -> None:
        """masks [1 + drafts, W] int32 on the host, a bit a token, all 0: set those of tokens that may come after the
        text, after draft 0, ...; all of them where it can't matter, behind a draft that is not allowed."""
        if self._over:
            masks.fill_(-1)
            return
        self._fill(masks[0])
        taken = 0
        while taken < len(drafts) and not self._over and self._take(drafts[taken : taken + 1]):
            taken += 1
            if not self._over:
                self._fill(masks[taken])
        masks[taken + (not self._over) :].fill_(-1)
        consumed = taken - self._over  # the matcher knows nothing of an EOS
        self._over = False
        if consumed and not self._matcher.rollback(consumed):
            raise PegboardError(f"drafts could not be taken back: {_reason(self._matcher)}")

    def _fill(self, row: Tensor) -> None:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            for id in self._eos_ids:  # complete, and nothing can be added
                bit = id % 32
                row[id // 32] |= 1 << bit if bit < 31 else -(1 << 31)
            return
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        if self._matcher.is_error():
            reason = _reason(self._matcher)
            if "NoExtension" in reason:
                raise PegboardError(f"no token of the vocabulary continues the text as the grammar wants it ({reason})")
            raise PegboardError(f"the grammar's parser gave up: {reason}")

    def _take(self, tokens: Sequence[int]) -> int:
        """How many of them follow; an EOS does if the text is complete, and is none of the matcher's business."""
        for count, token in enumerate(tokens):
            if self._over:
                return count
            if token in self._eos_ids:
                if not self._matcher.is_accepting():
                    return count
                self._over = True
            elif self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
                return count
        return len(tokens)
