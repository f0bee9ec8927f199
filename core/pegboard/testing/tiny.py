"""Small random checkpoints on disk, made with transformers: real files, real configs, an oracle that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_model(
    path: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    std: float = 0.3,
    shard_size: str | None = None,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `architecture` (a transformers model type) into the folder `path`.

    `overrides` are fields of its config; `std` spreads the weights, so that the best token stands out; `shard_size`
    ("200KB") splits the file. Needs transformers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 211,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": std,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(architecture, **(fields | overrides))
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model = made.to(getattr(torch, dtype)).eval()
    for name, weight in model.named_parameters():  # initialised to ones and zeros, where mistakes would not show
        if "norm" in name:
            weight.data += 0.2 * torch.randn_like(weight)
        elif name.endswith("bias"):
            weight.data.normal_(0.0, std)
    model.save_pretrained(path, **({} if shard_size is None else {"max_shard_size": shard_size}))
    return path
