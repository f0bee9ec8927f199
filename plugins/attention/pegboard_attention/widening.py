# Kernels are compiled by Triton: they are no typed Python
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Bytes of a quantized cache as numbers, inside kernels. See `quantized_kv` for what they stand for."""

from __future__ import annotations

import triton
import triton.language as tl

from .quantized_kv import STORED

#: Four bytes to four float16: offset binary, by 0x6400 | x = 1024 + x.
WIDEN_INT8 = tl.constexpr(
    """{
    .reg .b32 lo, hi, bias;
    mov.b32 bias, 0x64806480;
    prmt.b32 lo, $2, 0x64646464, 0x4140;
    prmt.b32 hi, $2, 0x64646464, 0x4342;
    sub.f16x2 $0, lo, bias;
    sub.f16x2 $1, hi, bias;
    }"""
)
#: e4m3 over 2^8: float16 has the same order of sign, exponent and mantissa. Subnormals included; NaN becomes 480.
WIDEN_E4M3_BITS = tl.constexpr(
    """{
    .reg .b32 lo, hi, slo, shi;
    prmt.b32 lo, $2, 0, 0x1404;
    prmt.b32 hi, $2, 0, 0x3424;
    shr.u32 slo, lo, 1;
    shr.u32 shi, hi, 1;
    and.b32 slo, slo, 0x3f803f80;
    and.b32 shi, shi, 0x3f803f80;
    lop3.b32 $0, lo, 0x80008000, slo, 0xEA;
    lop3.b32 $1, hi, 0x80008000, shi, 0xEA;
    }"""
)
#: e4m3 by the instruction of capability 8.9 and later.
WIDEN_E4M3 = tl.constexpr(
    """{
    .reg .b16 lo, hi;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
    }"""
)
#: The same without NaN: min takes the other number, 448.
WIDEN_E4M3_FINITE = tl.constexpr(
    """{
    .reg .b16 lo, hi;
    .reg .b32 top, wlo, whi;
    mov.b32 top, 0x5f005f00;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 wlo, lo;
    cvt.rn.f16x2.e4m3x2 whi, hi;
    min.f16x2 $0, wlo, top;
    min.f16x2 $1, whi, top;
    }"""
)


@triton.jit
def widen(x, FORMAT: tl.constexpr, FINITE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Bytes of a quantized cache -> float16: offset binary (1) to x - 128, e4m3 to x / 256 (2) or to x (3).

    FINITE: no NaN comes out, so that a weight of 0 gives 0."""
    if ASSEMBLY:
        E4M3: tl.constexpr = WIDEN_E4M3_FINITE if FINITE else WIDEN_E4M3
        CODE: tl.constexpr = WIDEN_INT8 if FORMAT == 1 else WIDEN_E4M3_BITS if FORMAT == 2 else E4M3
        wide = tl.inline_asm_elementwise(CODE, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif FORMAT == 1:
        wide = x.to(tl.float16) - 128.0
    else:
        bits = x.to(tl.int16)
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return wide


@triton.jit
def unit_of(FORMAT: tl.constexpr):
    """What one of `widen`'s numbers stands for."""
    return 256.0 if FORMAT == 2 else 1.0


@triton.jit
def dequantized(code, scale, dtype: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """scale * what the bytes stand for, rounded once, to `dtype`. `scale` float32 broadcasts."""
    return (widen(code, FORMAT, False, ASSEMBLY).to(tl.float32) * (scale * unit_of(FORMAT))).to(dtype)


def format_of(kv_dtype: str, *, hopper: bool) -> int:
    """The FORMAT of `widen` for a cache of this dtype; 0: its numbers are read as they are."""
    if kv_dtype not in STORED:
        return 0
    form = 1 + list(STORED).index(kv_dtype)
    return 3 if form == 2 and hopper else form
