"""Mistral: Llama with a window over all layers, or none (Jiang et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

from .config import Size
from .llama import Llama, LlamaConfig


class MistralConfig(LlamaConfig):
    absent = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
    architecture: ClassVar[str] = "MistralForCausalLM"
    without = {**LlamaConfig.without, "attention_bias": False, "mlp_bias": False}

    sliding_window: Size | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window


class Mistral(Llama):
    config_type = MistralConfig
