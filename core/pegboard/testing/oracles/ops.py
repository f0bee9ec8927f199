"""The ops by their definitions, in float64, and a linear to run them around."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ...contracts.ops import Norm, Rope


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), float64."""
    x, weight = x.double(), norm.weight.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (weight + norm.offset)


def gated(x: Tensor, activation: str) -> Tensor:
    """act(gate) * up of [gate | up], float64."""
    gate, up = x.double().chunk(2, dim=-1)
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    if activation == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    raise AssertionError(f"no definition of the gated activation {activation!r}")


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """x [T, heads, D] with each pair turned as a complex number, float64."""
    x, half = x.double(), rope.cos.shape[1]
    cos, sin = (table.double()[positions] for table in (rope.cos, rope.sin))
    turn = torch.complex(cos, sin)[:, None]
    out = x.clone()
    if rope.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    turned = torch.complex(x[..., first], x[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def rope_tables(rotary: int, length: int, *, interleaved: bool = False) -> Rope:
    """cos and sin [length, rotary / 2] of the usual frequencies, float32 on the CPU."""
    frequency = 10_000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return Rope(cos=angle.cos().float(), sin=angle.sin().float(), interleaved=interleaved)


class RowLinear:
    """y = x W^T + b, each row by itself, so that its bits do not depend on how many there are.

    `packed`: it shows no weight. `partition` "input": `weight` is one of two ranks' parts, both alike, and calling
    the linear sums them; the bias is added once."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        packed: bool = False,
        partition: Literal["output", "input"] | None = None,
    ) -> None:
        self._weight = weight
        self.weight = None if packed else weight
        self.bias, self.partition = bias, partition
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] in x's dtype, rounded once."""
        return self.exact(x).to(x.dtype)

    def exact(self, x: Tensor) -> Tensor:
        """The same in float64, not rounded."""
        rows = [row.double() @ self._weight.double().T for row in x]
        out = torch.stack(rows) * (2 if self.partition == "input" else 1)
        return out if self.bias is None else out + self.bias.double()
