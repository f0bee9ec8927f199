"""Which kernel runs what: the Hopper kernel where it can, the portable one elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from .options import KernelName
from .problem import Forward
from .tiling import Tiling, hopper_tiling, portable_tiling

#: Releases of Triton whose Gluon the Hopper kernel is written for: >= the first, < the second.
GLUON_RELEASES = ((3, 6), (3, 8))
HOPPER_DTYPES = ("bfloat16", "float16")
#: Bulk copies move 16 bytes at least; wider heads need more registers and shared memory than there are.
HOPPER_HEAD_SIZES = range(8, 129, 8)


class Path(NamedTuple):
    tiling: Tiling
    launch: Callable[[Forward], None]


def hopper_refusals(capability: tuple[int, int] | None, dtype: str, head_size: int) -> list[str]:
    """Why the Hopper kernel can't serve; empty: it can."""
    reasons = []
    if capability is None or capability[0] != 9:
        reasons.append("the Hopper kernel needs compute capability 9.x")
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not GLUON_RELEASES[0] <= release < GLUON_RELEASES[1]:
        low, high = (".".join(map(str, release)) for release in GLUON_RELEASES)
        reasons.append(f"the Hopper kernel is written for Triton >= {low}, < {high}, not {triton.__version__}")
    if dtype not in HOPPER_DTYPES:
        reasons.append(f"the Hopper kernel computes in {' and '.join(HOPPER_DTYPES)}, not in {dtype}")
    if head_size not in HOPPER_HEAD_SIZES:
        reasons.append(f"the Hopper kernel takes head sizes that are multiples of 8 up to 128, not {head_size}")
    return reasons


def choose_path(kernel: KernelName, capability: tuple[int, int] | None, dtype: str, head_size: int) -> Path:
    """The path for one layer. Its result does not depend on the batch, only on the layer and the device."""
    if kernel == "hopper" or (kernel == "auto" and not hopper_refusals(capability, dtype, head_size)):
        from .hopper_launch import launch

        return Path(hopper_tiling(head_size), launch)
    from .portable_launch import launch

    return Path(portable_tiling(head_size, capability), launch)


def device_capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
