"""Pegboard's own readers pass the suite that third-party ones run. Oracles: safetensors' and gguf's own code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor

from pegboard.testing.checkpoint import CheckpointSuite


class TestSafetensors(CheckpointSuite):
    part = "safetensors"

    def write(self, path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        (path / "config.json").write_text(json.dumps(dict(config)))
        save_file(dict(tensors), path / "model.safetensors")
        return path


class TestBfloat16(TestSafetensors):
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() for name, tensor in super().tensors().items()}


class TestShards(TestSafetensors):
    def write(self, path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        (path / "config.json").write_text(json.dumps(dict(config)))
        weights = {}
        for number, name in enumerate(tensors):
            file = f"model-{number + 1:05}-of-{len(tensors):05}.safetensors"
            save_file({name: tensors[name]}, path / file)
            weights[name] = file
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        return path


KIND = gguf.GGMLQuantizationType
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[module]}.weight"


class TestGGUF(CheckpointSuite):
    part = "gguf"
    rearranged = ("q_proj", "k_proj")
    kind = KIND.F32

    def write(self, path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
        file = path / "model.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        for name, tensor in tensors.items():
            values = tensor.numpy()
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
            if heads:  # what the converter does to the rows of q and k
                halves = values.reshape(config[heads], 2, -1, values.shape[1])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
            if values.ndim == 1 or self.kind == KIND.F32:
                writer.add_tensor(gguf_name(name), values)
            else:
                writer.add_tensor(gguf_name(name), quantize(values, self.kind), raw_dtype=self.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file


class TestGGUFBlocks(TestGGUF):
    """Rows are quantized one by one, so that their order does not matter to the oracle."""

    kind = KIND.Q4_1
    claims = ("blocks",)

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim == 1:
            return tensor
        return torch.from_numpy(dequantize(quantize(tensor.numpy(), self.kind), self.kind))

    def blocks(self, name: str, tensor: Tensor) -> Tensor | None:
        return None if tensor.ndim == 1 else torch.from_numpy(quantize(tensor.numpy(), self.kind))
