"""Small random checkpoints on disk, made with transformers: real files, real configs, an oracle that reads them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

#: What keeps a model of each type small beside the fields that all of them share; transformers' model types.
ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "phi3": {},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64},
}

#: Ids 0, 1 and 2.
_SPECIALS: Final = ("<unk>", "<s>", "</s>")
_CHAT: Final = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
#: Letters by how often English uses them.
_LETTERS: Final = "etaoinshrdlucmfwypvbgkjqxz"


def tiny_model(
    path: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    std: float = 0.3,
    shard_size: str | None = None,
    dtype: str = "float32",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `architecture` (a transformers model type) into the folder `path`.

    `overrides` are fields of its config; `std` spreads the weights, so that the best token stands out; `shard_size`
    ("200KB") splits the file. `tokenizer` adds a tokenizer.json of exactly the model's vocabulary (see
    `write_tokenizer`). Needs transformers.
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
        **ARCHITECTURES.get(architecture, {}),
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
    if tokenizer:
        write_tokenizer(path, config.vocab_size)
    return path


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder `path`: byte-level BPE with `vocab_size` ids.

    Ids 0, 1 and 2 are <unk>, <s> and </s>; then come bytes, printable ASCII first, then pairs of letters. From 259 ids
    on every text comes back as it was; with fewer, bytes without an id are <unk>. ValueError below 16 ids.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if vocab_size < 16:
        raise ValueError(f"a tokenizer of {vocab_size} ids can't tell letters apart: 16 is the least")
    letters = list(_byte_letters())
    vocab = {piece: id for id, piece in enumerate([*_SPECIALS, *letters][:vocab_size])}
    merges: list[tuple[str, str]] = []
    for first, second in itertools.product("Ġ" + _LETTERS, _LETTERS):
        if len(vocab) == vocab_size:
            break
        vocab[first + second] = len(vocab)
        merges.append((first, second))
    while len(vocab) < vocab_size:  # never made from a text, but a model may choose them
        vocab[f"[{len(vocab)}]"] = len(vocab)
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(piece, special=True) for piece in _SPECIALS])
    path.mkdir(parents=True, exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": _CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _byte_letters() -> Iterator[str]:
    """The letters that byte-level BPE writes for bytes: a space and small letters first, then other ASCII."""
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    first = ["Ġ", *_LETTERS, *(chr(code) for code in range(33, 127)), "Ċ"]  # Ġ: space, Ċ: newline
    ordered = dict.fromkeys([*first, *sorted(alphabet)])
    return (letter for letter in ordered if letter in alphabet)
