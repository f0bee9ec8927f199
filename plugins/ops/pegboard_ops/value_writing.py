"""Values of many tokens into a quantized cache, which holds them turned: [K, D, S], tokens side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .eight_bits import eight_bits, scale_of

if TYPE_CHECKING:
    from torch import Tensor

    from .launching import Launcher

_TOKENS = 32
#: Triton gives neighbouring lanes of a store, of whose addresses it knows nothing, to the first dimension up to 3.6 and
#: to the last from 3.7 on. Lanes along the tokens are several times as fast.
_LAST = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)


@triton.jit
def write_values(
    value_ptr,
    v_ptr,
    scale_ptr,
    index_ptr,
    tokens,
    value_row,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of tokens, KV heads). The tile is turned in the chip, since a token at a time would write single
    bytes, PAGE apart: a transaction of 32 bytes for each, which is what bounds such a write (8.4 million of them, for
    8192 tokens and 8 heads of 128, took 0.2 ms). Tokens that follow each other mostly do so in their page too, so that
    a warp's bytes are neighbours; where they are not, the result is the same and as slow."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    there = token < tokens
    at = value_ptr + token.to(tl.int64)[:, None] * value_row + head * D + d[None, :]
    x = tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    index = tl.load(index_ptr + token, mask=there, other=0)
    scale = scale_of(tl.max(tl.abs(x), 1), FORMAT)
    code = eight_bits(x, scale[:, None], FORMAT)
    in_page = index // PAGE * K + head
    inside = index % PAGE
    tl.store(scale_ptr + in_page * PAGE + inside, scale, mask=there)
    place = in_page * (PAGE * D) + inside
    if LAST:
        tl.store(v_ptr + place[None, :] + (d * PAGE)[:, None], tl.trans(code), mask=(d < D)[:, None] & there[None, :])
    else:
        tl.store(v_ptr + place[:, None] + (d * PAGE)[None, :], code, mask=there[:, None] & (d < D)[None, :])


def launch_value_write(
    values: Tensor, v: Tensor, scales: Tensor, write_index: Tensor, form: int, launcher: Launcher
) -> None:
    """values [T, K * D] with dense rows into v [pages, K, D, S] uint8 and scales [pages, K, S] at the flat entries
    write_index [T]; `form` is the FORMAT of `eight_bits`. Bytes: values read once, codes and scales written once."""
    tokens = values.shape[0]
    _, heads, size, page = v.shape
    write_values[(triton.cdiv(tokens, _TOKENS), heads)](
        values,
        v,
        scales,
        write_index,
        tokens,
        values.stride(0),
        K=heads,
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
        TOKENS=_TOKENS,
        PAGE=page,
        FORMAT=form,
        LAST=_LAST,
        PDL=launcher.pdl,
        num_warps=4,
        **launcher.options,
    )
