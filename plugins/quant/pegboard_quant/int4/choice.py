"""Whether the kernels serve a device, and a weight. Imports no Triton."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.contracts.quantizer import QuantizerNeed
from pegboard.errors import ConfigError

from ..packed.weight import PackedWeight
from .layout import TILE
from .tables import cuts_for, load_table

if TYPE_CHECKING:
    from .launching import Int4Launcher
    from .tuning import Int4Tuner, Shapes


def kernel_refusal(need: QuantizerNeed) -> str | None:
    """Why linears of 4 bits can't use the kernels here, or None."""
    if need.device.type != "cuda":
        return "the INT4 kernels need a CUDA device"
    capability = need.device.capability or (0, 0)
    if capability < (8, 0):
        return f"the INT4 kernels need compute capability 8.0 or more, not {capability[0]}.{capability[1]}"
    if need.dtype not in ("float16", "bfloat16"):
        return f"the INT4 kernels multiply float16 and bfloat16, not {need.dtype}"
    if find_spec("triton") is None:
        return "the INT4 kernels need triton, which is not installed"
    return None


def serves(bits: int, columns: int, group: int, scale_bytes: int) -> bool:
    """Whether they read weights of such groups, with scales of so many bytes."""
    return bits == 4 and scale_bytes == 2 and (group in (32, 64) or group % TILE == 0 or group >= columns)


def serves_weight(weight: PackedWeight) -> bool:
    """Columns must be runs of groups; they may be in any order."""
    if weight.groups is not None or (weight.offsets is not None and weight.group not in (32, 64)):
        return False
    return serves(weight.bits, weight.in_features, weight.group, weight.scales.itemsize)


def table_refusals(need: QuantizerNeed, table: Path | None) -> list[str]:
    """Why such a table of cuts can't be used."""
    if table is None:
        return []
    refusal = kernel_refusal(need)
    if refusal is not None:
        return [f"table: {refusal}; leave it out"]
    try:
        load_table(table, need.device)
    except ConfigError as error:
        return [str(error)]
    return []


def new_launcher(need: QuantizerNeed, table: Path | None = None) -> Int4Launcher | None:
    """An `Int4Launcher`, or None where there is a `kernel_refusal`. ConfigError: the table can't be used."""
    if kernel_refusal(need) is not None:
        return None
    from .launching import Int4Launcher

    return Int4Launcher(need.device.capability or (0, 0), cuts_for(need.device, table))


def new_tuner(need: QuantizerNeed, table: Path | None, shapes: Shapes) -> Int4Tuner:
    """ConfigError: there is a `kernel_refusal`, or the table that would be taken else can't be used."""
    launcher = new_launcher(need, table)
    if launcher is None:
        raise ConfigError(f"{kernel_refusal(need)}: nothing is there to tune")
    import torch

    from .tuning import Int4Tuner

    processors = torch.cuda.get_device_properties(need.device.index).multi_processor_count
    return Int4Tuner(need, shapes, launcher, processors)
