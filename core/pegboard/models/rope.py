"""Rotary embedding tables from a config, in both of its dialects (`rope_scaling`, `rope_parameters`).

Frequencies follow the config's own formula in float32, as the checkpoints were trained; float64 only for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.contracts.ops import Rope


def _linear(inv: Tensor, parameters: Mapping[str, Any], _config: Mapping[str, Any]) -> Tensor:
    return inv / float(parameters["factor"])


def _llama3(inv: Tensor, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1 model card)."""
    factor, low, high = (parameters[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
    wave = 2 * math.pi / inv
    blend = (original / wave - low) / (high - low)
    blended = (1 - blend) * inv / factor + blend * inv
    slowed = torch.where(wave > original / low, inv / factor, inv)
    between = (wave <= original / low) & (wave >= original / high)
    return torch.where(between, blended, slowed)


_SCALING: Mapping[str, Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], Tensor]] = {
    "default": lambda inv, _p, _c: inv,
    "linear": _linear,
    "llama3": _llama3,
    # GGUF files carry the factors as a tensor; the model divides by them after this.
    "gguf_factors": lambda inv, _p, _c: inv,
}


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the type's own keys, whichever dialect the config speaks."""
    merged: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    merged |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    merged["rope_type"] = merged.get("rope_type") or merged.pop("type", None) or "default"
    return merged


#: Parameters that a type can't do without.
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


def rope_refusals(config: Mapping[str, Any]) -> list[str]:
    for dialect in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(dialect), Mapping | None):
            return [f"{dialect} is {config[dialect]!r} in config.json, must be a table"]
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]
    if kind not in _SCALING:
        return [f"rope type {kind!r} is not supported; supported: {', '.join(sorted(_SCALING))}"]
    needed = ("rope_theta", *_NEEDED.get(kind, ()))
    reasons = [f"rope type {kind!r} needs {key!r} in its parameters" for key in needed if key not in parameters]
    numbers = {key: parameters[key] for key in needed if key in parameters}
    return reasons + [
        f"rope parameter {key} is {value!r}, must be a number above 0"
        for key, value in numbers.items()
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf
    ]


def make_rope(
    config: Mapping[str, Any],
    rotary_size: int,
    max_length: int,
    *,
    device: str,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> Rope:
    """Tables for positions 0 .. max_length-1 over `rotary_size` dimensions. `factors` [rotary_size / 2] divide the
    frequencies."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    parameters = rope_parameters(config)
    powers = torch.arange(0, rotary_size, 2, dtype=torch.int64).to(exact) / rotary_size
    inv = 1.0 / (parameters["rope_theta"] ** powers)
    inv = _SCALING[parameters["rope_type"]](inv, parameters, config)
    if factors is not None:
        inv = inv / factors.to(exact)
    angles = torch.arange(max_length, dtype=torch.int64).to(exact)[:, None] * inv[None, :]
    return Rope(cos=angles.cos().to(device), sin=angles.sin().to(device))
