"""Qwen2, Qwen2.5 and Qwen3: Llama with biases on q, k and v, then with norms on q and k instead (Yang et al. 2024 and
2025). The layers from `max_window_layers` on may have a window. Qwen3-MoE has experts, and a window on all layers or
none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from .config import Size
from .experts import ExpertLayout, too_few_experts
from .layout import Layout
from .llama import FULL, SLIDING, Llama, LlamaConfig


class _QwenConfig(LlamaConfig):
    absent = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
    without = {**LlamaConfig.without, "mlp_bias": False}

    use_sliding_window: bool = False
    sliding_window: Size | None = None
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    layer_types: list[str] | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def layer_kinds(self) -> list[str]:
        if self.layer_types is not None:
            return self.layer_types
        first = self.num_hidden_layers if self.window is None else self.max_window_layers
        return [SLIDING if index >= first else FULL for index in range(self.num_hidden_layers)]


class Qwen2Config(_QwenConfig):
    architecture: ClassVar[str] = "Qwen2ForCausalLM"

    def layout(self, config: Mapping[str, Any]) -> Layout:
        return msgspec.structs.replace(super().layout(config), qkv_bias=True, o_bias=False)


class Qwen3Config(_QwenConfig):
    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    head_dim: Size = 128

    def layout(self, config: Mapping[str, Any]) -> Layout:
        return msgspec.structs.replace(super().layout(config), head_norms=True)


class Qwen2(Llama):
    config_type = Qwen2Config


class Qwen3(Llama):
    config_type = Qwen3Config


class Qwen3MoeConfig(LlamaConfig):
    absent = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096}
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    without = {**LlamaConfig.without, "mlp_bias": False}

    use_sliding_window: bool = False
    sliding_window: Size | None = None
    #: Two names of one number, as transformers reads and writes it.
    num_experts: Size | None = None
    num_local_experts: Size = 128
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Annotated[int, Field(ge=0)]] = []

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def experts(self) -> int:
        return self.num_experts or self.num_local_experts

    def layout(self, config: Mapping[str, Any]) -> Layout:
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        experts = ExpertLayout(
            layers=tuple(i for i in range(self.num_hidden_layers) if i not in dense and (i + 1) % step == 0),
            count=self.experts,
            per_token=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            normalised=self.norm_topk_prob,
            rounded=True,
        )
        return msgspec.structs.replace(super().layout(config), head_norms=True, experts=experts)

    def reasons(self, config: Mapping[str, Any]) -> list[str]:
        return super().reasons(config) + too_few_experts(self.num_experts_per_tok, self.experts)


class Qwen3Moe(Llama):
    config_type = Qwen3MoeConfig
