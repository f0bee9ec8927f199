"""Qwen2, Qwen2.5 and Qwen3: Llama with biases on q, k and v, then with norms on q and k instead (Yang et al. 2024 and
2025). The layers from `max_window_layers` on may have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from .config import Size
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
