"""Rotary embedding tables from a config, in both of its dialects (`rope_scaling`, `rope_parameters`).

Frequencies follow the config's own formula in float32, as the checkpoints were trained; float64 only for float64.

A paged batch shares its cache between steps and its tables between rows, so a table is fixed when the model is made:

- dynamic (NTK): transformers leaves the frequencies alone up to `max_position_embeddings` and changes them with the
  length beyond. The engine admits no longer sequence, so it is the plain rotation here.
- longrope: transformers takes the short factors while the whole batch is within the original context, else the long
  ones, also for what is cached already. Here the engine's `max_length` decides: the short factors when no sequence can
  leave the original context, else the long ones, for short sequences as well. To get the short ones, set `max_length`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from pegboard.contracts.ops import Rope

from .config import ModelConfig, Positive

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
#: Its logarithm divides.
Context = Annotated[int, Field(ge=2)]


class Plain(ModelConfig):
    """One rope type with its parameters. `default`, and the base of the others."""

    rope_theta: Positive

    def misfits(self, rotary_size: int) -> list[str]:
        """What does not fit heads of which `rotary_size` dimensions turn."""
        return []

    def frequencies(self, waves: Tensor, max_length: int) -> Tensor:
        """waves [D_rot / 2]: theta^(2i / D_rot) -> radians a position"""
        return 1.0 / waves

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied with."""
        return 1.0

    def reach(self, context_length: int) -> int:
        """Positions that this type serves in a model with `max_position_embeddings` of `context_length`."""
        return context_length


class Dynamic(Plain):
    """See the module. Only its presence is checked here: within the context the factor does nothing."""

    factor: Positive


class Linear(Plain):
    factor: Positive

    def frequencies(self, waves: Tensor, max_length: int) -> Tensor:
        return super().frequencies(waves, max_length) / self.factor


class Llama3(Plain):
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1 model card)."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Context

    def frequencies(self, waves: Tensor, max_length: int) -> Tensor:
        inv = super().frequencies(waves, max_length)
        factor, low, high = self.factor, self.low_freq_factor, self.high_freq_factor
        original = self.original_max_position_embeddings
        wave = 2 * math.pi / inv
        blend = (original / wave - low) / (high - low)
        blended = (1 - blend) * inv / factor + blend * inv
        slowed = torch.where(wave > original / low, inv / factor, inv)
        between = (wave <= original / low) & (wave >= original / high)
        return torch.where(between, blended, slowed)


class Yarn(Plain):
    """Dimensions that turn often are kept, those that turn rarely are slowed by `factor`, with a ramp between (Peng et
    al. 2023). Serves `factor` times the original context, whatever `max_position_embeddings` says."""

    max_position_embeddings: Context
    original_max_position_embeddings: Context
    factor: Positive | None = None
    attention_factor: NotNegative | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    beta_fast: NotNegative | None = None
    beta_slow: NotNegative | None = None
    truncate: bool = True

    @property
    def _factor(self) -> float:
        return self.factor or self.max_position_embeddings / self.original_max_position_embeddings

    def _dimension(self, turns: float, size: int) -> float:
        """The dimension, of `size`, that turns so often over the original context."""
        period = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(period) / (2 * math.log(self.rope_theta))

    def misfits(self, rotary_size: int) -> list[str]:
        return [] if self.rope_theta > 1 else [f"rope type 'yarn' needs a rope_theta above 1, not {self.rope_theta}"]

    def frequencies(self, waves: Tensor, max_length: int) -> Tensor:
        size = 2 * len(waves)
        low, high = self._dimension(self.beta_fast or 32, size), self._dimension(self.beta_slow or 1, size)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = (torch.arange(len(waves), dtype=waves.dtype) - low) / ((high if high != low else low + 0.001) - low)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (self._factor * waves) * (1 - kept) + 1.0 / waves * kept

    @property
    def amplitude(self) -> float:
        def grown(scale: float) -> float:
            return 1.0 if self._factor <= 1 else 0.1 * scale * math.log(self._factor) + 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def reach(self, context_length: int) -> int:
        return max(context_length, int(self.original_max_position_embeddings * self._factor))


class LongRope(Plain):
    """A factor a dimension, for short and for long contexts (Ding et al. 2024). See the module for which is taken."""

    max_position_embeddings: Context
    original_max_position_embeddings: Context
    short_factor: list[Positive]
    long_factor: list[Positive]
    factor: Positive | None = None
    attention_factor: NotNegative | None = None

    def misfits(self, rotary_size: int) -> list[str]:
        return [
            f"rope type 'longrope': {name} has {len(factors)} numbers; {rotary_size // 2} dimensions turn"
            for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor))
            if len(factors) != rotary_size // 2
        ]

    def frequencies(self, waves: Tensor, max_length: int) -> Tensor:
        short = max_length <= self.original_max_position_embeddings
        factors = torch.tensor(self.short_factor if short else self.long_factor, dtype=waves.dtype)
        return 1.0 / (factors * waves)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        factor = self.factor or self.max_position_embeddings / original
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


_TYPES: Mapping[str, type[Plain]] = {
    "default": Plain,
    "linear": Linear,
    "dynamic": Dynamic,
    "llama3": Llama3,
    "yarn": Yarn,
    "longrope": LongRope,
    # GGUF files carry the factors as a tensor; the model divides by them after this.
    "gguf_factors": Plain,
}


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the type's own keys, whichever dialect the config speaks."""
    merged: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    merged |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    merged["rope_type"] = merged.get("rope_type") or merged.pop("type", None) or "default"
    if merged["rope_type"] in ("llama3", "yarn", "longrope"):
        here, key = config.get("max_position_embeddings"), "original_max_position_embeddings"
        merged["max_position_embeddings"] = here
        # A config that says it outside of the table means it
        merged[key] = config.get(key) or merged.get(key) or here
    return merged


def rotary_size(config: Mapping[str, Any], head_size: int) -> int:
    """Dimensions of a head that turn (`partial_rotary_factor`); 0 when the factor is none."""
    share = rope_parameters(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is None:
        return head_size
    valid = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    return int(head_size * share) if valid else 0


def is_no_table(config: Mapping[str, Any]) -> list[str]:
    return [
        f"{dialect} is {config[dialect]!r} in config.json, must be a table"
        for dialect in ("rope_parameters", "rope_scaling")
        if not isinstance(config.get(dialect), Mapping | None)
    ]


def rope_refusals(config: Mapping[str, Any], rotary_size: int | None) -> list[str]:
    """`rotary_size`: see `make_rope`; None when it is not known."""
    wrong = is_no_table(config)
    if wrong:
        return wrong
    parameters = rope_parameters(config)
    kind = str(parameters["rope_type"])
    if kind not in _TYPES:
        return [f"rope type {kind!r} is not supported; supported: {', '.join(sorted(_TYPES))}"]
    reasons = [
        f"{name} among the rope parameters is not supported: one rotation for all layers and all kinds of tokens is"
        for name, value in parameters.items()
        if isinstance(value, Mapping) or (name == "mrope_section" and value is not None)
    ]
    problems = _TYPES[kind].problems(parameters)
    reasons += [f"rope type {kind!r}: {problem}" for problem in problems]
    if rotary_size is not None and not problems:
        reasons += _TYPES[kind].read(parameters).misfits(rotary_size)
    return reasons


def rope_reach(config: Mapping[str, Any]) -> int:
    """Positions that a model of this config was made for."""
    parameters = rope_parameters(config)
    return _TYPES[parameters["rope_type"]].read(parameters).reach(config["max_position_embeddings"])


def make_rope(
    config: Mapping[str, Any],
    rotary_size: int,
    max_length: int,
    *,
    device: str,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> Rope:
    """Tables for positions 0 .. max_length-1 over `rotary_size` dimensions, an attention factor in them. `factors`
    [rotary_size / 2] divide the frequencies."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    parameters = rope_parameters(config)
    kind = _TYPES[parameters["rope_type"]].read(parameters)
    powers = torch.arange(0, rotary_size, 2, dtype=torch.int64).to(exact) / rotary_size
    inv = kind.frequencies(kind.rope_theta**powers, max_length)
    if factors is not None:
        inv = inv / factors.to(exact)
    angles = torch.arange(max_length, dtype=torch.int64).to(exact)[:, None] * inv[None, :]
    scale = kind.amplitude
    return Rope(cos=(angles.cos() * scale).to(device), sin=(angles.sin() * scale).to(device))
