"""GGUF's blocks of 4 bits, as codes in groups of 32 columns.

Q4_0 and Q4_1 have blocks of 32 columns: the scale (float16), in Q4_1 the offset (float16), then 16 bytes, the first 16
codes in their low halves and the others in the high ones. Q4_0 is scale * (code - 8), Q4_1 scale * code + offset.

Q4_K has blocks of 256: d and dmin (float16), 12 bytes of eight scales and eight minima of 6 bits, then for each 64
columns 32 bytes like those 16. It is d * scale * code - dmin * minimum. A group has a scale and an offset of 16 bits
here, so both products, which have up to 17 bits, are rounded to float16: that is all that is lost."""

from __future__ import annotations

from typing import Final

import msgspec
import torch
from torch import Tensor

from pegboard.errors import CheckpointError

from .codes import pack
from .weight import PackedWeight

#: Columns of a group.
GROUP: Final = 32


class BlockKind(msgspec.Struct, frozen=True):
    #: Columns and bytes of a block.
    columns: int
    nbytes: int
    #: Whether groups have an offset beside their scale.
    shifted: bool


#: By GGUF's name.
KINDS: Final = {
    "Q4_0": BlockKind(32, 18, shifted=False),
    "Q4_1": BlockKind(32, 20, shifted=True),
    "Q4_K": BlockKind(256, 144, shifted=True),
}


def read_blocks_as_codes(blocks: Tensor, kind: BlockKind) -> PackedWeight:
    """uint8 [O, blocks * nbytes], on any device. CheckpointError: a scale or offset is too large for float16."""
    each = torch.unflatten(blocks.contiguous(), 1, (-1, kind.nbytes))
    run = GROUP if kind.columns > GROUP else GROUP // 2
    halves = torch.unflatten(each[:, :, -kind.columns // 2 :], 2, (-1, run))
    codes = torch.stack((halves & 15, halves >> 4), 3).flatten(1)
    heads = each[:, :, : 4 if kind.shifted else 2].contiguous().view(torch.float16)
    scales, offsets = _q4_k_steps(each, heads) if kind.columns > GROUP else (heads[:, :, 0], heads[:, :, -1])
    return PackedWeight(
        bits=4,
        in_features=codes.shape[1],
        group=GROUP,
        codes=pack(codes, 4),
        scales=scales.contiguous(),
        offsets=offsets.contiguous() if kind.shifted else None,
    )


def _q4_k_steps(blocks: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of Q4_K's groups, float16 [O, groups]."""
    low, middle, high = torch.unflatten(blocks[:, :, 4:16], 2, (3, 4)).unbind(2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), 2)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), 2)
    exact = heads[:, :, :1].float() * scales, heads[:, :, 1:].float() * minima
    largest = max(float(part.abs().nan_to_num(0, 0).max()) for part in exact)
    if largest > torch.finfo(torch.float16).max:
        raise CheckpointError(
            f"a group of Q4_K blocks has a scale or an offset of {largest:g}, and float16 ends at 65504"
        )
    return exact[0].half().flatten(1), exact[1].neg().half().flatten(1)
