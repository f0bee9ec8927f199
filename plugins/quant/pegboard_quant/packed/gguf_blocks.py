"""GGUF's blocks of 4 bits, 32 columns each: the scale (float16), in Q4_1 the offset (float16), then 16 bytes, the first
16 codes in their low halves and the others in the high ones. Q4_0 is scale * (code - 8), Q4_1 scale * code + offset."""

from __future__ import annotations

from typing import Final

import msgspec
import torch
from torch import Tensor

from .codes import pack
from .weight import PackedWeight

#: Columns of a block.
BLOCK: Final = 32
_CODES: Final = 16


class BlockKind(msgspec.Struct, frozen=True):
    nbytes: int
    #: Whether an offset follows the scale.
    shifted: bool


#: By GGUF's name.
KINDS: Final = {"Q4_0": BlockKind(18, shifted=False), "Q4_1": BlockKind(20, shifted=True)}


def read_blocks_as_codes(blocks: Tensor, kind: BlockKind) -> PackedWeight:
    """uint8 [O, blocks * nbytes], on any device."""
    rows = blocks.shape[0]
    each = blocks.contiguous().view(rows, -1, kind.nbytes)
    steps = each[:, :, : kind.nbytes - _CODES].contiguous().view(torch.float16)
    halves = each[:, :, kind.nbytes - _CODES :]
    codes = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
    return PackedWeight(
        bits=4,
        in_features=codes.shape[1],
        group=BLOCK,
        codes=pack(codes, 4),
        scales=steps[:, :, 0].contiguous(),
        offsets=steps[:, :, 1].contiguous() if kind.shifted else None,
    )
