"""What `unpacking` does, for kernels in Gluon, which name the registers of everything."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .unpacking import (
    ADD_BFLOAT16,
    ADD_FLOAT16,
    MUL_BFLOAT16,
    MUL_FLOAT16,
    UNPACK_BFLOAT16,
    UNPACK_CONSTRAINTS,
    UNPACK_FLOAT16,
)


@gluon.jit
def unpack_words(words, DTYPE: gl.constexpr):
    """[..., words] -> [..., words, 2, 2, 2] codes plus B, as `unpacking.unpack_words` has them before it sorts bits."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300 - a constexpr stands for a type
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            UNPACK_BFLOAT16, UNPACK_CONSTRAINTS, [words],
            dtype=(
                gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
                gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            ),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            UNPACK_FLOAT16, UNPACK_CONSTRAINTS, [words],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return gl.join(gl.join(gl.join(a, e), gl.join(c, g)), gl.join(gl.join(b, f), gl.join(d, h)))


@gluon.jit
def left_codes(words, BN: gl.constexpr, LEFT: gl.constexpr, DTYPE: gl.constexpr):
    """Words [2, BN / 64, 512] -> codes plus B [BN, 128], the left operand of `wgmma`."""
    # Bits: w9, all rows from 64 on, w8 to w0, the code's; see `layout`
    codes = gl.reshape(unpack_words(words, DTYPE), [2, BN // 64, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    codes = gl.permute(codes, [1, 2, 3, 11, 4, 5, 6, 0, 9, 12, 13, 7, 8, 10])
    return gl.convert_layout(gl.reshape(codes, [BN, 128]), LEFT, assert_trivial=True)


@gluon.jit
def less_zero(codes, zero):
    """Codes less zero points, int32 of a shape with 1 for inputs, and less B. Exact."""
    base: gl.constexpr = 128 if codes.dtype == gl.bfloat16 else 1024
    ADD: gl.constexpr = ADD_BFLOAT16 if codes.dtype == gl.bfloat16 else ADD_FLOAT16
    less, _ = gl.broadcast((-base - zero).to(codes.dtype), codes)
    return gl.inline_asm_elementwise(ADD, "=r,r,r", [codes, less], dtype=codes.dtype, is_pure=True, pack=2)


@gluon.jit
def scale_of(step, SCALE: gl.constexpr):
    return (step & 0xFFFF).to(gl.int16).to(SCALE, bitcast=True)


@gluon.jit
def times_scale(codes, scale):
    """Rounded once to the dtype of codes; scale has 1 for inputs."""
    wide, _ = gl.broadcast(scale, codes.to(scale.dtype))
    if scale.dtype == codes.dtype:
        MUL: gl.constexpr = MUL_BFLOAT16 if codes.dtype == gl.bfloat16 else MUL_FLOAT16
        w = gl.inline_asm_elementwise(MUL, "=r,r,r", [codes, wide], dtype=codes.dtype, is_pure=True, pack=2)
    else:
        w = (codes.to(gl.float32) * wide.to(gl.float32)).to(codes.dtype)
    return w


@gluon.jit
def store_sums(y, n, m, bias, out, M, N, OUT_STRIDE, BIAS: gl.constexpr, ADDS: gl.constexpr):
    """y [outputs n, rows m] with the bias, with ADDS to what `out` holds."""
    if BIAS:
        y += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    there = (n < N)[:, None] & (m < M)[None, :]
    at = out + m[None, :].to(gl.int64) * OUT_STRIDE + n[:, None]
    if ADDS:
        y += gl.load(at, mask=there, other=0.0).to(gl.float32)
    gl.store(at, y.to(out.dtype.element_ty), mask=there)
