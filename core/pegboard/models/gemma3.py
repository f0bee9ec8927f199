"""Gemma 3, text only: norms before and after each block and on q and k, a scaled embedding, and layers with a window,
which have a rotation of their own (Gemma Team 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from .config import Positive, Size
from .layout import Layout
from .llama import FULL, SLIDING, Llama, LlamaConfig


class Gemma3Config(LlamaConfig):
    absent = {"max_position_embeddings": 131072, "num_key_value_heads": 4, "sliding_window": 4096}
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    without = {
        "mlp_bias": False,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "text_config": None,
    }

    head_dim: Size = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: Positive = 256
    sliding_window: Size | None = None
    sliding_window_pattern: Size = 6
    layer_types: list[str] | None = None
    final_logit_softcapping: Positive | None = None

    @property
    def activation(self) -> str:
        return self.hidden_activation

    @property
    def window(self) -> int | None:
        return self.sliding_window

    def layer_kinds(self) -> list[str]:
        """Without layer_types, every `sliding_window_pattern`-th layer sees all."""
        if self.layer_types is not None:
            return self.layer_types
        every = self.sliding_window_pattern
        return [SLIDING if (index + 1) % every else FULL for index in range(self.num_hidden_layers)]

    @classmethod
    def ropes(cls, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Both dialects: rope_parameters by kind of layer; or rope_theta and rope_scaling for layers that see all, and
        rope_local_base_freq for layers with a window."""
        tables = config.get("rope_parameters") or {}
        full = {"rope_theta": config.get("rope_theta", 1e6), **_table(tables.get(FULL))}
        full |= config.get("rope_scaling") or {}
        local = {"rope_theta": config.get("rope_local_base_freq", 1e4), **_table(tables.get(SLIDING))}
        context = {"max_position_embeddings": config["max_position_embeddings"]}
        return {**context, "rope_parameters": full}, {**context, "rope_parameters": local}

    def layout(self, config: Mapping[str, Any]) -> Layout:
        return msgspec.structs.replace(
            super().layout(config),
            scale=self.query_pre_attn_scalar**-0.5,
            head_norms=True,
            post_norms=True,
            norm_offset=1.0,
            norm_rounds_first=False,
            embedding_scale=self.hidden_size**0.5,
            logit_softcap=self.final_logit_softcapping,
        )

    @classmethod
    def rope_reasons(cls, config: Mapping[str, Any], head_size: int | None) -> list[str]:
        reasons = super().rope_reasons(config, head_size)
        tables = config.get("rope_parameters")
        foreign = sorted(set(tables) - {FULL, SLIDING}) if isinstance(tables, Mapping) else []
        if foreign:
            reasons.append(f"rope_parameters has {', '.join(foreign)}; it must be a table each for {FULL}, {SLIDING}")
        return reasons


def _table(found: Any) -> Mapping[str, Any]:
    """Something else than a table is refused as the rope type that it is not."""
    if found is None:
        return {}
    return found if isinstance(found, Mapping) else {"rope_type": found}


class Gemma3(Llama):
    config_type = Gemma3Config
