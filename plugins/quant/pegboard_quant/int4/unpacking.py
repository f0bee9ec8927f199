"""Words of 4-bit codes -> the left operand of a product, in registers.

A code q becomes the number B + q (B is 128 in bfloat16, 1024 in float16), whose bits are those of B with q in the
lowest: one logical instruction for two codes. Then zero points and B are subtracted, two at a time; all is exact."""

from __future__ import annotations

import triton
import triton.language as tl


def _assembly(base: int) -> str:
    """Two words -> eight registers of two numbers each: codes of the first word, 16 bits apart, then of the second."""
    lines = [".reg .b32 t;"]
    for word in range(2):
        for place in range(4):
            source = f"${8 + word}"
            if place:
                lines.append(f"shr.u32 t, {source}, {4 * place};")
                source = "t"
            lines.append(f"lop3.b32 ${4 * word + place}, {source}, 0x000F000F, {base:#010x}, 0xEA;")
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK_BFLOAT16 = tl.constexpr(_assembly(0x43004300))
UNPACK_FLOAT16 = tl.constexpr(_assembly(0x64006400))
UNPACK_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")
ADD_BFLOAT16 = tl.constexpr("{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }")
ADD_FLOAT16 = tl.constexpr("add.rn.f16x2 $0, $1, $2;")
MUL_BFLOAT16 = tl.constexpr("{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }")
MUL_FLOAT16 = tl.constexpr("mul.rn.f16x2 $0, $1, $2;")


@triton.jit
def unpack_words(words, DTYPE: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr):
    """[16 BN] words of half a tile or a tile -> [BN, 128] of DTYPE: codes, plus B where ASM."""
    if ASM:
        if DTYPE == tl.bfloat16:  # noqa: SIM300 - a constexpr stands for a type
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                UNPACK_BFLOAT16, UNPACK_CONSTRAINTS, [words],
                dtype=(
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                ),
                is_pure=True, pack=2,
            )  # fmt: skip
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                UNPACK_FLOAT16, UNPACK_CONSTRAINTS, [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True, pack=2,
            )  # fmt: skip
        codes = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    else:
        shifts = tl.reshape(tl.arange(0, 8) * 4, [1, 2, 1, 2, 2])
        codes = ((tl.reshape(words, [BN * 8, 1, 2, 1, 1]) >> shifts) & 15).to(DTYPE)
    # Bits of a code's place: those of a word, highest first, then (low bit of a word's, n1, n0); see `layout`
    if BN == 64:
        bits = tl.reshape(codes, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
        bits = tl.permute(bits, [1, 2, 10, 3, 4, 5, 0, 8, 11, 12, 6, 7, 9])
    else:
        tl.static_assert(BN == 128)
        bits = tl.reshape(codes, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
        bits = tl.permute(bits, [0, 2, 3, 11, 4, 5, 6, 1, 9, 12, 13, 7, 8, 10])
    return tl.reshape(bits, [BN, 128])


@triton.jit
def less_zero(w, zero, ASM: tl.constexpr):
    """w [BN, columns] less zero points, [BN] or [BN, columns] int32, and less what `unpack_words` added."""
    if len(zero.shape) == 1:
        zero = zero[:, None]
    if not ASM:
        return w - zero.to(w.dtype)
    if w.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            ADD_BFLOAT16, "=r,r,r", [w, (-128 - zero).to(w.dtype)], dtype=w.dtype, is_pure=True, pack=2
        )
    return tl.inline_asm_elementwise(
        ADD_FLOAT16, "=r,r,r", [w, (-1024 - zero).to(w.dtype)], dtype=w.dtype, is_pure=True, pack=2
    )


@triton.jit
def times_scale(w, scale, ASM: tl.constexpr):
    """w [BN, columns] times scale, of [BN] or [BN, columns], rounded once to the dtype of w."""
    if len(scale.shape) == 1:
        scale = scale[:, None]
    if not ASM or scale.dtype != w.dtype:
        return (w.to(tl.float32) * scale.to(tl.float32)).to(w.dtype)
    MUL: tl.constexpr = MUL_BFLOAT16 if w.dtype == tl.bfloat16 else MUL_FLOAT16
    return tl.inline_asm_elementwise(MUL, "=r,r,r", [w, scale], dtype=w.dtype, is_pure=True, pack=2)
