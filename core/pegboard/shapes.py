"""Models without weights, for benchmarks: "random:NAME" or "random:PATH" names a shape, whose weights are drawn when it
is opened.

The shapes known by name are those of published models, by the config.json of their makers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from .errors import CheckpointError

#: How the name of such a model begins.
SCHEME: Final = "random:"

_LLAMA: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "eos_token_id": 128001,
}
_LLAMA3_ROPE: Final[Mapping[str, Any]] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN3: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "eos_token_id": 151645,
}

#: Name -> config.json.
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama-8b": {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
            "tie_word_embeddings": False,
        },
        "llama-1b": {
            **_LLAMA,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
            "tie_word_embeddings": True,
        },
        "mistral-7b": {
            "architectures": ["MistralForCausalLM"],
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32768,
            "eos_token_id": 2,
        },
        "qwen3-0.6b": {
            **_QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        "qwen3-8b": {
            **_QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
        "smollm2-135m": {
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
            "eos_token_id": 2,
        },
    }
)


def resolve_shape(name: str) -> Path:
    """What `name`, with its "random:", stands for, with its path made absolute. CheckpointError: nothing."""
    shape = name.removeprefix(SCHEME)
    if shape in SHAPES:
        return Path(name)
    path = Path(shape).expanduser().absolute()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(
            f"{name!r} is neither a shape that is known ({', '.join(SHAPES)}) nor the path of a config.json or of a "
            "folder with one"
        )
    return Path(f"{SCHEME}{file}")


def read_shape(path: Path) -> Mapping[str, Any]:
    """The config of what `resolve_shape` gave. CheckpointError: it can't be read."""
    shape = str(path).removeprefix(SCHEME)
    if shape in SHAPES:
        return SHAPES[shape]
    try:
        found = json.loads(Path(shape).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shape} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{shape} holds no JSON object")
    return found
