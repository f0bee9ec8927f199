"""Norm by head, rotation and the write into the cache in one pass over q, k and v, float32.

Letters: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from typing import Final

import numpy

from .project_kernel import norm_row
from .vectors import (
    WIDTH,
    copy_lanes,
    get,
    get_double,
    get_long,
    inner,
    kernel,
    put,
    team_size,
    thread_number,
    turn_lanes,
)

#: T, H, K, D; qkv, step of its rows; positions, write_index; cos, sin, pairs that turn, interleaved; q, k;
#: cache of k, of v; weight of q's norm, of k's; eps and offset of q's, of k's
LAYOUT: Final = "18q4d"


@inner(fastmath={"contract"})
def _turn(x: int, size: int, out: int, cos: int, sin: int, pairs: int, interleaved: int) -> None:
    """x and out [D], perhaps the same; cos and sin [pairs]."""
    apart, stride, done = pairs, 1, 0
    if interleaved != 0:
        apart, stride = 1, 2
    else:
        while done + WIDTH <= pairs:
            at, other = 4 * done, 4 * (done + pairs)
            turn_lanes(x + at, x + other, cos + at, sin + at, out + at, out + other)
            done += WIDTH
    for i in range(done, pairs):
        a, b = get(x, stride * i), get(x, stride * i + apart)
        put(out, stride * i, a * get(cos, i) - b * get(sin, i))
        put(out, stride * i + apart, b * get(cos, i) + a * get(sin, i))
    _copy(x + 8 * pairs, out + 8 * pairs, size - 2 * pairs)


@inner()
def _copy(x: int, out: int, size: int) -> None:
    done = 0
    while done + WIDTH <= size:
        copy_lanes(x + 4 * done, out + 4 * done)
        done += WIDTH
    for i in range(done, size):
        put(out, i, get(x, i))


@kernel
def rope_write(call: int) -> None:
    tokens, heads, kv_heads = get_long(call, 0), get_long(call, 1), get_long(call, 2)
    size, qkv, qkv_step = get_long(call, 3), get_long(call, 4), get_long(call, 5)
    positions, index, cos, sin = get_long(call, 6), get_long(call, 7), get_long(call, 8), get_long(call, 9)
    pairs, interleaved, q, k = get_long(call, 10), get_long(call, 11), get_long(call, 12), get_long(call, 13)
    k_cache, v_cache = get_long(call, 14), get_long(call, 15)
    threads, thread = numpy.int64(team_size()), numpy.int64(thread_number())
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        place = 4 * get_long(positions, token) * pairs
        entry, x = 4 * get_long(index, token) * kv_heads * size, qkv + token * qkv_step
        for head in range(heads + kv_heads):
            is_key = numpy.int64(head >= heads)
            weight = get_long(call, 16 + is_key)
            eps, offset = get_double(call, 18 + 2 * is_key), get_double(call, 19 + 2 * is_key)
            out = k + 4 * (token * kv_heads + head - heads) * size if is_key else q + 4 * (token * heads + head) * size
            if weight != 0:
                norm_row(x, size, weight, out, numpy.float32(eps), numpy.float32(offset))
                _turn(out, size, out, cos + place, sin + place, pairs, interleaved)
            else:
                _turn(x, size, out, cos + place, sin + place, pairs, interleaved)
            if is_key:
                _copy(out, k_cache + entry + 4 * (head - heads) * size, size)
            x += 4 * size
        _copy(x, v_cache + entry, kv_heads * size)
