"""Numbers as bytes with a scale: what the quantized layouts of the cache hold."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(most, FORMAT: tl.constexpr):
    """The scale of numbers of at most `most`. At least 2^-100: the reader takes the logarithm."""
    TOP: tl.constexpr = 127.0 if FORMAT == 1 else 448.0
    return tl.maximum(most / TOP, 7.888609052210118e-31)


@triton.jit
def eight_bits(x, scale, FORMAT: tl.constexpr):
    """x / scale as bytes: offset binary (1) or e4m3 (2), rounded to the nearest, ties to even."""
    ratio = x / scale
    if FORMAT == 1:
        whole = (ratio + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no room for a fraction
        code = (whole + 128.0).to(tl.int32)
    else:
        # float16 bits of the number over 2^8 are those of e4m3 with seven more of mantissa
        bits = (ratio * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        size = bits & 0x7FFF
        code = ((bits >> 8) & 0x80) | ((size + 0x3F + ((size >> 7) & 1)) >> 7)
    return code.to(tl.uint8)
