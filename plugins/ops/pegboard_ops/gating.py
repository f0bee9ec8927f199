"""Gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.contracts.ops import Activation

    from .launching import Launcher


_BLOCK = 1024
#: Tokens up to which the next kernel may start before the one before this has ended. Measured on an H200: with 4-bit
#: weights steps of 1 to 16 rows take 1 to 3% less, with 32 rows 5% more, as programs of the next product crowd.
_EARLY_TOKENS = 16


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, gelu_tanh or gelu of float32 x."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        z = x
        if ACTIVATION == "gelu_tanh":  # 0.5 x (1 + tanh(z / 2)) = x sigmoid(z)
            z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(tl.minimum(-z, 80.0)))  # e^80 is as good as infinite
    return y


@triton.jit
def gated_activation(
    x_ptr, out_ptr, x_row, F: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of F): out = act(gate) * up, one read and one write."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(x_ptr + row * x_row + f, mask=f < F, other=0.0)
    up = tl.load(x_ptr + row * x_row + F + f, mask=f < F, other=0.0)
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    active = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    tl.store(out_ptr + row * F + f, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=f < F)


def launch_gated(x: Tensor, activation: Activation, launcher: Launcher) -> Tensor:
    """x [T, 2F] = [gate | up], dense rows -> [T, F]

    Reference: `pegboard.ops.TorchOps.gated`, whose rounding of act(gate) it repeats; act itself is within 2 units in
    the last place of float32. Bytes: 2F read and F written a token."""
    tokens, width = x.shape
    out = x.new_empty(tokens, width // 2)
    gated_activation[(tokens, triton.cdiv(width // 2, _BLOCK))](
        x,
        out,
        x.stride(0),
        F=width // 2,
        BLOCK=_BLOCK,
        ACTIVATION=activation,
        PDL=launcher.pdl,
        EARLY=launcher.pdl and tokens <= _EARLY_TOKENS,
        num_warps=4,
        **launcher.options,
    )
    return out
