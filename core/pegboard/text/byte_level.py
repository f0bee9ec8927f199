"""Byte-level BPE: which bytes a token stands for, whatever stands around it."""

from __future__ import annotations

import json
from typing import Any, Final

import tokenizers


class ByteTokens:
    """The bytes of a vocabulary's tokens, each looked up once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._token_of = backend.id_to_token
        self._known: dict[int, bytes] = {}

    @staticmethod
    def of(backend: tokenizers.Tokenizer) -> ByteTokens | None:
        """None: its decoder does more than write a token's bytes."""
        decoder = backend.decoder
        if decoder is None:
            return None
        described: Any = json.loads(decoder.__getstate__())
        steps = described["decoders"] if described["type"] == "Sequence" else [described]
        return ByteTokens(backend) if [step["type"] for step in steps] == ["ByteLevel"] else None

    def __getitem__(self, id: int) -> bytes:
        """Empty for an id that does not exist."""
        found = self._known.get(id)
        if found is None:
            token = self._token_of(id)
            found = self._known[id] = b"" if token is None else _bytes_of(token)
        return found


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself if it is one, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + place): b for place, b in enumerate(others)}


_ALPHABET: Final = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """An added token that has characters outside the alphabet is plain text."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()
