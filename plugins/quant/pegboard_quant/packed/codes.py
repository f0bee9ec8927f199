"""Rows of codes of 4 or 8 bits, packed into bytes: the first of two in the low half, rows padded to whole 32-bit words.

On a little-endian machine those are the words of GPTQ and compressed-tensors: reading them is a view or a transpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Every row begins at a multiple of this many bytes.
_WORD = 4


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a packed row of so many codes."""
    return -(-columns * bits // (8 * _WORD)) * _WORD


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [O, I] uint8 -> [O, `row_bytes`] uint8; the padding is zeros."""
    rows, columns = codes.shape
    packed = codes.new_zeros(rows, row_bytes(columns, bits))
    if bits == 8:
        packed[:, :columns] = codes
        return packed
    packed[:, : (columns + 1) // 2] = codes[:, ::2]
    packed[:, : columns // 2] |= codes[:, 1::2] << 4
    return packed


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """[O, bytes] uint8 -> codes [O, I] uint8."""
    if bits == 8:
        return packed[:, :columns]
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)[:, :columns]


def words_to_rows(words: Tensor) -> Tensor:
    """int32 [O, W], each with its first code in its lowest bits -> the same as packed rows [O, 4 W] uint8."""
    return words.contiguous().view(torch.uint8)
