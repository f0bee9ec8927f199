"""Products of bytes that torch has for CPUs: whole numbers times INT8 weights, summed exactly.

fbgemm's takes a fifth of oneDNN's time at one row and uses all threads; torch wants to part with the quantized tensors
that it is packed from, so oneDNN's stands behind it.
"""

from __future__ import annotations

import logging
import warnings
from typing import Final, Protocol

import torch
from torch import Tensor

from .probing import probe

logger = logging.getLogger("pegboard")

#: Steps between 0 and a channel's largest weight.
WEIGHT_LEVELS: Final = 127


class Product(Protocol):
    """A packed weight [O, I] of int8 with a scale [O] a channel."""

    def __init__(self, weight: Tensor, scales: Tensor) -> None: ...

    def __call__(self, steps: Tensor, levels: int) -> Tensor:
        """steps [T, I], float32, rounded to whole numbers in -levels .. levels -> steps W^T * scales, float32 [T, O].

        A step that is NaN gives any finite number."""
        ...


class FbgemmProduct:
    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per", UserWarning)  # deprecated, and said once a process
            quantized = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(quantized, None)

    def __call__(self, steps: Tensor, levels: int) -> Tensor:
        # The operator rounds, and adds the byte that stands for 0
        sums: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            steps, 1.0, levels + 1, self._packed
        )
        return sums


class OneDnnProduct:
    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scales = scales
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int32)

    def __call__(self, steps: Tensor, levels: int) -> Tensor:
        zero = levels + 1  # there are fast kernels for unsigned activations only
        rounded = steps.round().add_(zero).to(torch.uint8)
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, zero, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return sums


def exact_levels(product: type[Product]) -> int | None:
    """127, or 63 where the CPU adds pairs of products in 16 bits (no VNNI); None: neither is exact, or this torch lacks
    the operators. Tried on the largest sums that there can be."""
    signs = torch.tensor([1, 1, -1, -1], dtype=torch.int8).repeat(32)
    weight = torch.stack((signs.abs(), -signs.abs(), signs, -signs)).repeat(16, 1) * WEIGHT_LEVELS
    for levels in (127, 63):
        steps = torch.stack((signs.abs(), -signs.abs(), signs)) * levels
        expected = (steps.long() @ weight.long().T).float()
        try:
            packed = product(weight, torch.ones(weight.shape[0]))
            parts = (steps, steps[:1], steps[1:2], steps[2:])  # together, and one row at a time
            found = [packed(part.float(), levels) for part in parts]
        except (AttributeError, RuntimeError, TypeError) as error:
            logger.info("torch %s has no %s here: %s", torch.__version__, product.__name__, error)
            return None
        if torch.equal(found[0], expected) and torch.equal(torch.cat(found[1:]), expected):
            return levels
    return None


@probe
def best_product() -> tuple[type[Product], int] | None:
    """The first product that is exact on this CPU, with its levels. Tried once."""
    for product in (FbgemmProduct, OneDnnProduct):
        levels = exact_levels(product)
        if levels is not None:
            return product, levels
    return None
