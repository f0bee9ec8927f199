"""The noise of `pegboard.noise` inside of kernels, in float32.

The integers are the definition's; -log(-log1p(-v)) is computed from v or 1 - v, whichever is small and so exact, with
an error of some 1e-6 at most, far below what decides between tokens (1e-4)."""

from __future__ import annotations

import triton
import triton.language as tl

from pegboard.noise import ACCEPTANCE, KEY_STEPS, MULTIPLIERS, ROUNDS
from pegboard.noise import RESIDUAL as _RESIDUAL
from pegboard.noise import TOKENS as _TOKENS

_M0 = tl.constexpr(MULTIPLIERS[0])
_M1 = tl.constexpr(MULTIPLIERS[1])
_S0 = tl.constexpr(KEY_STEPS[0])
_S1 = tl.constexpr(KEY_STEPS[1])
_ROUNDS = tl.constexpr(ROUNDS)
_ACCEPTANCE = tl.constexpr(ACCEPTANCE)
#: Streams.
TOKENS, RESIDUAL = tl.constexpr(_TOKENS), tl.constexpr(_RESIDUAL)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log(x, FAST: tl.constexpr):
    """FAST: the device's own logarithm, absolute error 2**-22 near 1, relative elsewhere. It takes normal numbers."""
    if FAST:
        return (
            tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
            * _LN2
        )
    else:
        return tl.log(x)


@triton.jit
def _product(a, multiplier):
    """Upper and lower word of a 32 x 32 product, in one instruction."""
    product = a.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox(ids, position, seed, STREAM: tl.constexpr):
    """First output word, uint32, for token ids (int32) and an int64 position and seed."""
    m0 = tl.full([], _M0, tl.uint64)
    m1 = tl.full([], _M1, tl.uint64)
    s0 = tl.full([], _S0, tl.uint32)
    s1 = tl.full([], _S1, tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = ids.to(tl.uint32)
    c1 = position.to(tl.uint32)
    c2 = (position >> 32).to(tl.uint32)
    c3 = tl.full([], STREAM, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _product(c0, m0)
        high1, low1 = _product(c2, m1)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + s0
        k1 = k1 + s1
    return c0


@triton.jit
def bound(ids, position, seed, FAST: tl.constexpr):
    """No less than the noise, and cheaper: -log(v), as v <= -log1p(-v); inf where v is least."""
    return 22.18071 - log(philox(ids, position, seed, TOKENS).to(tl.float32), FAST)


@triton.jit
def gumbel(ids, position, seed, STREAM: tl.constexpr, FAST: tl.constexpr):
    word = philox(ids, position, seed, STREAM)
    upper = word > 0x7FFFFFFF
    near = tl.where(upper, 0xFFFFFFFF - word, word).to(tl.uint32).to(tl.int32)
    near = (near.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # v, or 1 - v: at most 1/2
    far = 1.0 - near
    exponential = -log(tl.where(upper, near, far), FAST)
    # -log1p(-near) loses its digits near 0
    series = near * (1.0 + near * (0.5 + near * (0.33333334 + near * (0.25 + near * 0.2))))
    exponential = tl.where(upper | (near > 0.03), exponential, series)
    return -log(exponential, FAST)


@triton.jit
def uniform(position, seed):
    """v of the noise that accepts a draft or not, float32: rounded to 1 at most."""
    word = philox(tl.full([], 0, tl.int32), position, seed, _ACCEPTANCE)
    return (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
