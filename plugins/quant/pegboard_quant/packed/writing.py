"""int4 and int8 as checkpoints: compressed-tensors' pack-quantized format, rounded by one of three methods."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from pegboard.contracts.quantizer import LinearStatistics, WeightWriter
from pegboard.errors import ConfigError

from ..options import RoundingOptions
from .codes import pack
from .gptq_rounding import gptq_codes
from .rounding import grid_of

logger = logging.getLogger("pegboard")

Method = Literal["rtn", "awq", "gptq"]
METHODS: Final = ("rtn", "awq", "gptq")
#: Powers of the inputs' magnitudes that are tried as scales.
_POWERS: Final = tuple(power / 10 for power in range(11))


class PackQuantizedWriter(WeightWriter):
    """rtn: the nearest codes. gptq: see `gptq_codes`. awq: the nearest codes of weights whose columns were scaled by a
    power of their inputs' magnitudes (Lin et al., "AWQ", 2023), the one that changes the linear's results least."""

    def __init__(self, bits: int, method: str, options: RoundingOptions) -> None:
        if method not in METHODS:
            raise ConfigError(f"method {method!r} is unknown; known are {', '.join(METHODS)}")
        self._bits, self._method, self._options = bits, method, options
        self.needs_statistics = method != "rtn"
        self.folds = method == "awq"
        #: Columns that were warned of.
        self._told: set[int] = set()

    def config(self, skipped: Sequence[str]) -> Mapping[str, Any]:
        group = self._options.group
        weights = {
            "num_bits": self._bits,
            "type": "int",
            "symmetric": self._options.symmetric,
            "strategy": "channel" if group == -1 else "group",
            "group_size": None if group == -1 else group,
            "actorder": "weight" if self._method == "gptq" else None,
            "dynamic": False,
        }
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(skipped),
        }

    def tensors(self, weight: Tensor, statistics: LinearStatistics | None) -> Mapping[str, Tensor]:
        self._tell(weight.shape[1])
        grid = grid_of(weight, self._bits, self._options.group, symmetric=self._options.symmetric)
        if self._method == "gptq" and statistics is not None:
            codes = gptq_codes(weight, grid, statistics.moment)
        else:
            codes = grid.codes(weight)
        stored = {
            "weight_packed": pack(codes, self._bits).view(torch.int32),
            "weight_scale": grid.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if grid.zeros is not None:
            stored["weight_zero_point"] = pack(grid.zeros.T.contiguous(), self._bits).view(torch.int32).T.contiguous()
        return stored

    def _tell(self, columns: int) -> None:
        group = self._options.group
        if group > 0 and columns % group and columns not in self._told:
            self._told.add(columns)
            logger.warning(
                "%d columns are no whole groups of %d: the last group is shorter, which Pegboard reads and other "
                "engines refuse; take a group that divides them, such as %d",
                columns,
                group,
                math.gcd(columns, group),
            )

    def scales(self, weight: Tensor, statistics: LinearStatistics) -> Tensor:
        best, least = torch.ones(weight.shape[1]), float("inf")
        for power in _POWERS:
            scales = statistics.magnitude.clamp(min=1e-6) ** power
            scales /= (scales.max() * scales.min()).sqrt()
            scaled = weight * scales
            grid = grid_of(scaled, self._bits, self._options.group, symmetric=self._options.symmetric)
            error = grid.values(grid.codes(scaled)).div_(scales).sub_(weight)
            # The mean of |error x|^2 over the inputs that were seen
            loss = float((error @ statistics.moment).mul_(error).sum())
            if loss < least:
                best, least = scales, loss
        return best
