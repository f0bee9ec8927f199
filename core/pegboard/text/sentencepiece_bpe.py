"""SentencePiece's BPE as a `tokenizers` object: pieces with scores, the pair whose union scores highest merged first
(Kudo and Richardson 2018; Sennrich et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

from pegboard.errors import CheckpointError

_SPACE = "\u2581"
_NORMAL, _BYTE = 1, 6


def sentencepiece_bpe(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown: str | None, space_prefix: bool
) -> tokenizers.Tokenizer:
    """Piece i has id i. `types` as GGUF numbers them; added tokens are the caller's. `unknown` stands for a character
    without a piece where there are no bytes to spell it with. `space_prefix` puts a space before a text and before
    what follows an added token, and takes the first one away in decoding."""
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    spelled = sum(kind == _BYTE for kind in types)
    if spelled and (spelled != 256 or not all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))):
        raise CheckpointError(f"the vocabulary has {spelled} byte tokens; expected <0x00> to <0xFF>, or none")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            _merges(pieces, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=spelled > 0,
        )
    )
    escape = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape]) if space_prefix else escape
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return tokenizer


def _merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best first. Only ordinary pieces take part: those that a user
    defined are found whole, before the others, and control tokens are never made of text."""
    ids = {piece: place for place, (piece, kind) in enumerate(zip(pieces, types, strict=True)) if kind == _NORMAL}
    merges: list[tuple[str, str]] = []
    for piece, _ in sorted(ids.items(), key=lambda item: (-scores[item[1]], item[1])):
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        made = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(made, key=lambda pair: (ids[pair[0]], ids[pair[1]])) if len(made) > 1 else made
    return merges
