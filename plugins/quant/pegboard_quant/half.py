"""float32 linears over weights that were stored in 16 bits: they stay so in memory, and lose nothing."""

from __future__ import annotations

import logging
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from pegboard.linears import DenseParts

from .linears import ShardLinear
from .probing import probe

logger = logging.getLogger("pegboard")

#: Below this part of the weight's norm, what float16 loses is less than float32 products round.
_NEGLIGIBLE: Final = 2.0**-26


class HalfLinear(ShardLinear):
    """float32 activations and sums, float16 weights (fbgemm): at few rows, where the weights' bytes are what takes the
    time, two to three times as fast as float32 ones; no slower at many.

    bfloat16 has more range and less precision than float16: scaled by a power of two, its weights fit within 2^-39 of
    the largest. A row's result does not depend on how many there are, bit for bit."""

    def __init__(self, parts: DenseParts) -> None:
        super().__init__(parts)
        self._scale = _scale(parts.weight)
        weight = parts.weight if self._scale == 1.0 else parts.weight * self._scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        if self._scale != 1.0:
            out.mul_(1 / self._scale)
        return out if bias is None else out.add_(bias)

    @property
    def matrix_bytes(self) -> int:
        return self.out_features * self.in_features * torch.float16.itemsize


def _scale(weight: Tensor) -> float:
    """The power of two that makes `weight` fit into float16; 1.0 if it does."""
    lost = (weight.half().float() - weight).norm()
    largest = weight.abs().max() if weight.numel() else weight.new_zeros(())
    if lost <= _NEGLIGIBLE * weight.norm() or not largest.isfinite():
        return 1.0
    return 2.0 ** (15 - int(torch.frexp(largest).exponent))


@probe
def can_halve() -> bool:
    """Whether this torch has these products, tried once: the operators are not of its public interface."""
    weight = torch.arange(48.0).view(6, 8)
    x = torch.ones(2, 8) + 2.0**-20  # lost in float16 activations
    try:
        packed = HalfLinear(DenseParts(weight=weight, bias=None, all_reduce=None, partition=None))
        found = packed(x)
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("16-bit weights become float32: torch %s has no operators here (%s)", torch.__version__, error)
        return False
    return bool(torch.allclose(found, linear(x, weight), rtol=2.0**-22, atol=0))
