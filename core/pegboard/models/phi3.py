"""Phi-3 and Phi-3.5: Llama with q, k and v stored as one matrix, gate and up as another (Abdin et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from .config import Positive, Size
from .layout import Layout
from .llama import Llama, LlamaConfig
from .rope import rope_parameters


class Phi3Config(LlamaConfig):
    absent = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    without = {**LlamaConfig.without, "attention_bias": False, "mlp_bias": False}
    partial_rotary: ClassVar[bool] = True

    rms_norm_eps: Positive = 1e-5
    sliding_window: Size | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @classmethod
    def ropes(cls, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        # Early checkpoints called longrope so.
        if rope_parameters(config)["rope_type"] not in ("su", "yarn"):
            return config, config
        table = {**(config.get("rope_scaling") or config["rope_parameters"]), "rope_type": "longrope"}
        renamed = {**config, "rope_scaling": None, "rope_parameters": table}
        return renamed, renamed

    def layout(self, config: Mapping[str, Any]) -> Layout:
        return msgspec.structs.replace(super().layout(config), fused=True)


class Phi3(Llama):
    config_type = Phi3Config
