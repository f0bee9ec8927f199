from __future__ import annotations

import json
from pathlib import Path

import pytest

#: A Llama of two small layers; "random:" models draw their weights when they are loaded.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model for tests of the whole engine. It has no tokenizer: prompts are lists of ids."""
    file: Path = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(SHAPE))
    return f"random:{file}"
