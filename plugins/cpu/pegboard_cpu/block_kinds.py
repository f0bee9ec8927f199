"""The types of GGUF blocks that have a kernel, and how this CPU multiplies their numbers."""

from __future__ import annotations

from typing import Final

import msgspec

from .vectors import WIDTH, features

#: Inputs that share a scale of the rounded activations.
BLOCK: Final = 32
#: Output features of a tile.
LANES: Final = WIDTH
#: Whether the CPU adds four products of bytes to an int32 at once (VNNI); else pairs are added in 16 bits.
FOURFOLD: Final = LANES == 16 and features.get("avx512vnni", False)
#: Why this CPU can't, or "".
REFUSAL: Final = (
    ""
    if (LANES == 8 or (LANES == 16 and features.get("avx512bw")))
    else "multiplies bytes with AVX2 or AVX-512BW, which this CPU lacks"
)


class Kind(msgspec.Struct, frozen=True):
    """A block type that is served: weights are scale * (number - zero) + minimum.

    A record is what a feature has of one of the file's blocks, without loss: a float16 scale; with a minimum another
    float16; then for each 32 inputs, where there are `factors`, whole numbers of a byte that multiply the scale (of all
    32, or with sign of each 16) and the minimum (of all 32); the bits of the numbers above the lowest four; these."""

    name: str
    #: Bits of a number.
    bits: int
    #: Whether a block has a minimum beside its scale.
    minimum: bool
    #: What is subtracted from the numbers as this CPU reads them, which are unsigned.
    zero: int
    #: Bytes of a block in the file.
    file_bytes: int
    #: Whether the numbers, unlike these, have a sign.
    signed: bool = False
    #: Blocks of 32 inputs in one of the file's.
    blocks: int = 1
    #: Factors of the scale in 32 inputs.
    factors: int = 0

    @property
    def columns(self) -> int:
        """Inputs of one of the file's blocks."""
        return BLOCK * self.blocks

    @property
    def head_bytes(self) -> int:
        return 4 if self.minimum else 2

    @property
    def factor_bytes(self) -> int:
        """Of 32 inputs: those of the scale, then that of the minimum."""
        return self.factors + (1 if self.factors and self.minimum else 0)

    @property
    def block_bytes(self) -> int:
        """Of 32 inputs, in a record."""
        return self.factor_bytes + BLOCK * self.bits // 8

    @property
    def record_bytes(self) -> int:
        return self.head_bytes + self.blocks * self.block_bytes

    @property
    def sums(self) -> int:
        """Sums that a row has to have of 32 inputs: one for each scale."""
        return max(1, self.factors)


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("Q4_0", bits=4, minimum=False, zero=8, file_bytes=18),
        Kind("Q4_1", bits=4, minimum=True, zero=0, file_bytes=20),
        Kind("Q5_0", bits=5, minimum=False, zero=16, file_bytes=22),
        Kind("Q5_1", bits=5, minimum=True, zero=0, file_bytes=24),
        Kind("Q8_0", bits=8, minimum=False, zero=128 if FOURFOLD else 0, file_bytes=34, signed=not FOURFOLD),
        Kind("Q4_K", bits=4, minimum=True, zero=0, file_bytes=144, blocks=8, factors=1),
        Kind("Q5_K", bits=5, minimum=True, zero=0, file_bytes=176, blocks=8, factors=1),
        Kind("Q6_K", bits=6, minimum=False, zero=32, file_bytes=210, blocks=8, factors=2),
    )
}
