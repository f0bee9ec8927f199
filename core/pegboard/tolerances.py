"""How far results of the same arithmetic may be apart, by dtype."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Tolerance(NamedTuple):
    """|found - expected| <= absolute + relative * |expected|, `expected` in float64 from the same rounded inputs."""

    absolute: float
    relative: float


#: For one layer's worth of arithmetic on inputs of unit size.
TOLERANCES: Final[Mapping[str, Tolerance]] = MappingProxyType(
    {
        # Sums of a few thousand terms in another order: tens of units in the last place (2.2e-16)
        "float64": Tolerance(1e-12, 1e-12),
        # The same in float32 (1.2e-7), and exp and tanh of kernels that are good to a few units
        "float32": Tolerance(2e-5, 2e-5),
        # The result is rounded (4.9e-4), and so are softmax weights before they meet V on tensor cores
        "float16": Tolerance(4e-3, 4e-3),
        # Likewise with 8 bits of significand (3.9e-3)
        "bfloat16": Tolerance(3e-2, 3e-2),
    }
)

#: Relative error of a token's vector that two right engines may have after all layers: rounding adds up, and a norm
#: passes on what came in.
DRIFT: Final[Mapping[str, float]] = MappingProxyType(
    {"float64": 1e-9, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
)


def absolute_error(found: Tensor, reference: Tensor) -> Tensor:
    """|found - reference| in float64, elementwise. Equal infinities and NaN in the same place are no error; other
    places where one is not finite are an infinite one."""
    import torch

    found, reference = found.double(), reference.double()
    same = (found == reference) | (found.isnan() & reference.isnan())
    return torch.where(same, 0.0, (found - reference).abs()).nan_to_num(nan=torch.inf)


def root_mean_square(x: Tensor) -> Tensor:
    """Of the finite elements, in float64: a scalar."""
    x = x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return (x.square().sum() / max(x.numel(), 1)).sqrt()
