"""Norm by head, rotation and the write into the cache in one pass over q, k and v, float32.

Letters: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from typing import Any, Final

import numpy
from numba import carray, cfunc, njit

from .project_kernel import norm_row
from .vectors import floats, longs, thread_number

#: threads, T, H, K, D; qkv, step of its rows; positions, write_index; cos, sin, pairs that turn, interleaved; q, k;
#: cache of k, of v; weight of q's norm, of k's; eps and offset of q's, of k's
LAYOUT: Final = "19q4d"
_COUNT: Final = 23


@njit(fastmath={"contract"})
def _turn(x: Any, out: Any, cos: Any, sin: Any, interleaved: int) -> None:
    """x and out [D], perhaps the same; cos and sin [pairs]."""
    pairs, size = cos.shape[0], x.shape[0]
    if interleaved != 0:
        for i in range(pairs):
            a, b = x[2 * i], x[2 * i + 1]
            out[2 * i] = a * cos[i] - b * sin[i]
            out[2 * i + 1] = b * cos[i] + a * sin[i]
    else:
        for i in range(pairs):
            a, b = x[i], x[pairs + i]
            out[i] = a * cos[i] - b * sin[i]
            out[pairs + i] = b * cos[i] + a * sin[i]
    for i in range(2 * pairs, size):
        out[i] = x[i]


@cfunc("void(voidptr)", cache=True, error_model="numpy")
def rope_write(call: Any) -> None:
    a, real = carray(call, (_COUNT,), numpy.int64), carray(call, (_COUNT,), numpy.float64)
    threads, tokens, heads, kv_heads, size, qkv, qkv_step = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    positions, index = longs(a[7], tokens), longs(a[8], tokens)
    cos, sin, pairs, interleaved, q, k = a[9], a[10], a[11], a[12], a[13], a[14]
    k_cache, v_cache, q_weight, k_weight = a[15], a[16], a[17], a[18]
    share = (tokens + threads - 1) // threads
    first = numpy.int64(thread_number()) * share
    for token in range(first, min(first + share, tokens)):
        place = 4 * positions[token] * pairs
        turn_cos, turn_sin = floats(cos + place, pairs), floats(sin + place, pairs)
        entry = 4 * index[token] * kv_heads * size
        for head in range(heads + kv_heads):
            is_query = head < heads
            if is_query:
                out, weight = floats(q + 4 * (token * heads + head) * size, size), q_weight
                eps, offset = numpy.float32(real[19]), numpy.float32(real[20])
            else:
                out, weight = floats(k + 4 * (token * kv_heads + head - heads) * size, size), k_weight
                eps, offset = numpy.float32(real[21]), numpy.float32(real[22])
            x = floats(qkv + token * qkv_step + 4 * head * size, size)
            if weight != 0:
                norm_row(x, floats(weight, size), out, eps, offset)
                x = out
            _turn(x, out, turn_cos, turn_sin, interleaved)
            if not is_query:
                kept = floats(k_cache + entry + 4 * (head - heads) * size, size)
                for i in range(size):
                    kept[i] = out[i]
        width = kv_heads * size
        v, kept = floats(qkv + token * qkv_step + 4 * (heads + kv_heads) * size, width), floats(v_cache + entry, width)
        for i in range(width):
            kept[i] = v[i]
