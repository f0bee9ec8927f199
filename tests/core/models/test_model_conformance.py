"""Pegboard's own architectures pass the suite that third-party ones run."""

from __future__ import annotations

from pathlib import Path

from pegboard.testing.model import ModelSuite
from pegboard.testing.tiny import tiny_model


class TestLlama(ModelSuite):
    part = "llama"
    claims = ("taps",)
    dtypes = ("float32", "bfloat16")
    unsupported = {"hidden_act": "relu6", "attn_logit_softcapping": 30.0}

    def write_checkpoint(self, path: Path) -> Path:
        return tiny_model(path, attention_bias=True, mlp_bias=True, tokenizer=False)


class TestTiedLlama(ModelSuite):
    part = "llama"

    def write_checkpoint(self, path: Path) -> Path:
        return tiny_model(path, tie_word_embeddings=True, num_attention_heads=6, hidden_size=72, head_dim=12)


class TestQwen3(ModelSuite):
    part = "qwen3"
    claims = ("taps",)

    def write_checkpoint(self, path: Path) -> Path:
        return tiny_model(path, architecture="qwen3", tokenizer=False)


class TestGemma3(ModelSuite):
    part = "gemma3"
    claims = ("taps",)
    unsupported = {"use_bidirectional_attention": True}

    def write_checkpoint(self, path: Path) -> Path:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        return tiny_model(path, architecture="gemma3_text", sliding_window=20, layer_types=kinds, tokenizer=False)
