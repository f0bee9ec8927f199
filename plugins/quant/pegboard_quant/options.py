"""Options of the first-party quantizers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DenseOptions(BaseModel):
    """Options of the part `none`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: On a CPU, hold float32 weights in oneDNN's order. Faster; a tied embedding is then held twice.
    pack: bool = True


class Int8CpuOptions(BaseModel):
    """Options of the part `int8-cpu`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Activations of two bytes: as good as float32 ones. Of one: faster prefill, and texts that differ sooner.
    activations: Literal["int16", "int8"] = "int16"
    #: What computes many rows at once: the same int8 weights, or float32 ones that are held beside them.
    prefill: Literal["int8", "float32"] = "int8"


class BlocksCudaOptions(BaseModel):
    """Options of the part `blocks-cuda`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Linears of fewer weights, on each device, become dense: their products are faster so. None: 2^23, and 0 with the
    #: objective `memory`.
    dense_below: int | None = Field(default=None, ge=0)


class PackedOptions(BaseModel):
    """Options of the parts `awq`, `gptq` and `compressed-tensors`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: A file that `pegboard tune` wrote on such a device; None: the shipped table, or rules.
    table: Path | None = None


class RoundingOptions(BaseModel):
    """What the parts `int4` and `int8` have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Columns that share a scale; -1: all of a row.
    group: Literal[32, 64, 128, -1] = 128
    #: Without zero points: a little less memory, and less precise.
    symmetric: bool = False
    #: Modules that stay dense, by whole components of their names ("lm_head", "mlp", "layers.0").
    skip: tuple[str, ...] = ("lm_head",)


class Rounding4Options(RoundingOptions):
    """Options of the part `int4`."""

    #: A file that `pegboard tune` wrote on such a device; None: the shipped table, or rules.
    table: Path | None = None


class Rounding8Options(RoundingOptions):
    """Options of the part `int8`."""

    group: Literal[32, 64, 128, -1] = -1
    symmetric: bool = True
