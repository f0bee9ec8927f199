"""exp and what is made of it, float32, as arithmetic that a compiler can do for a whole vector at once."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy

from .vectors import float_of_bits, inner

SILU: Final = 1
GELU_TANH: Final = 2
GELU: Final = 3
ACTIVATIONS: Final = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU}

_f = numpy.float32
_LOG2E: Final = _f(1.4426950408889634)
#: ln 2 in two parts: the first has few bits, so that its multiples are exact (Cody and Waite).
_LN2_HIGH: Final = _f(0.693145751953125)
_LN2_LOW: Final = _f(1.42860682030941723212e-6)
_HALF, _ONE, _TWO = _f(0.5), _f(1.0), _f(2.0)
#: Beyond these 2^n leaves float32's normal range.
_LEAST: Final = _f(-87.3)
_GREATEST: Final = _f(88.3)
#: Taylor series of exp on |r| <= ln 2 / 2, from r^2 on: the term that is left out is below 2e-8.
_C2, _C3, _C4 = _f(1 / 2), _f(1 / 6), _f(1 / 24)
_C5, _C6, _C7 = _f(1 / 120), _f(1 / 720), _f(1 / 5040)
_SQRT_HALF: Final = _f(math.sqrt(0.5))
_GELU_INNER: Final = _f(2 * math.sqrt(2 / math.pi))
_GELU_CUBE: Final = _f(0.044715)


@inner(fastmath={"contract"})
def exp(x: Any) -> Any:
    """Within about 2 units in the last place; 0 below -87.3 (where float32 has 1.2e-38), NaN of NaN; x is at most
    88.3 or is taken to be."""
    inside = _LEAST if x < _LEAST else _GREATEST if x > _GREATEST else x
    n = numpy.floor(inside * _LOG2E + _HALF)
    r = (inside - n * _LN2_HIGH) - n * _LN2_LOW
    series = _C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7))))
    value = (_ONE + (r + r * r * series)) * float_of_bits((numpy.int32(n) + numpy.int32(127)) << numpy.int32(23))
    return _f(0.0) if x < _LEAST else value if x == x else x


@inner(fastmath={"contract"})
def silu(x: Any) -> Any:
    return x / (_ONE + exp(-x))


@inner(fastmath={"contract"})
def gelu_tanh(x: Any) -> Any:
    """0.5 x (1 + tanh(u)) = x / (1 + exp(-2u))"""
    return x / (_ONE + exp(-_GELU_INNER * (x + _GELU_CUBE * x * x * x)))


@inner(fastmath={"contract"})
def gelu(x: Any) -> Any:
    return _HALF * x * (_ONE + _f(math.erf(x * _SQRT_HALF)))
