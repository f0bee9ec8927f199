"""Ids to text, a few at a time: the pieces joined are exactly what decoding all ids at once gives."""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

from .byte_level import ByteTokens
from .tokenizer import Tokenizer

_REPLACEMENT: Final = "�"
#: Tokens of a byte-fallback vocabulary that stand for one byte.
_BYTE_TOKEN = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")


class IncrementalDetokenizer:
    """One per sequence; constant work a token.

    A character that is not complete yet is held back, so U+FFFD comes out for bytes that are no UTF-8, and for
    nothing else. A byte-fallback vocabulary judges a run of byte tokens as a whole (one bad byte spoils the run), so
    there the run is held until it ends.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        tokens = tokenizer.byte_tokens
        self._stream: _Stream = _WindowStream(tokenizer) if tokens is None else _ByteStream(tokens)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids settle; "" while a character is incomplete."""
        return self._stream.push([i for i in ids if i not in self._skipped])

    def finish(self) -> str:
        """The rest; incomplete characters come out as U+FFFD. Nothing may be pushed afterwards."""
        return self._stream.finish()


class _Stream(ABC):
    @abstractmethod
    def push(self, ids: Iterable[int]) -> str: ...

    @abstractmethod
    def finish(self) -> str: ...


class _ByteStream(_Stream):
    """A token is a run of bytes."""

    def __init__(self, tokens: ByteTokens) -> None:
        self._tokens = tokens
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, ids: Iterable[int]) -> str:
        return self._decode(b"".join([self._tokens[id] for id in ids]))

    def finish(self) -> str:
        return self._decode(b"", final=True)


class _WindowStream(_Stream):
    """Any other decoder. A token's text may depend on the token before it (a leading space is dropped at the start
    only), so each piece is the difference of two decodings: with and without the new tokens, both behind the tokens
    of the piece before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._new: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push(id) for id in ids])

    def _push(self, id: int) -> str:
        token = self._tokenizer.backend.id_to_token(id)
        if token is None:
            return ""
        self._new.append(id)
        return "" if _BYTE_TOKEN.match(token) else self._take()

    def finish(self) -> str:
        return self._take()

    def _take(self) -> str:
        if not self._new:
            return ""
        shown = self._decode(self._before)
        piece = self._decode([*self._before, *self._new])[len(shown) :]
        self._before, self._new = self._new, []
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)
