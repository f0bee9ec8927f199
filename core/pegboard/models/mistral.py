"""Mistral: Llama with a window over all layers, or none (Jiang et al. 2023). Mixtral: the same with experts (2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from .config import Positive, Size
from .experts import ExpertLayout, too_few_experts
from .layout import Layout
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


class MixtralConfig(MistralConfig):
    absent = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 1e6}
    architecture: ClassVar[str] = "MixtralForCausalLM"

    rms_norm_eps: Positive = 1e-5
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2

    def layout(self, config: Mapping[str, Any]) -> Layout:
        experts = ExpertLayout(
            layers=tuple(range(self.num_hidden_layers)),
            count=self.num_local_experts,
            per_token=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            normalised=True,
            rounded=False,
            block="block_sparse_moe",
            names=("w1", "w3", "w2"),
        )
        return msgspec.structs.replace(super().layout(config), experts=experts)

    def reasons(self, config: Mapping[str, Any]) -> list[str]:
        return super().reasons(config) + too_few_experts(self.num_experts_per_tok, self.num_local_experts)


class Mixtral(Llama):
    config_type = MixtralConfig
