"""GGUF metadata and tensor names, told in the Hugging Face dialect.

To add an architecture: an entry in ARCHITECTURES, and in NAMES if its tensors have names of their own.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from pegboard.errors import CheckpointError


class Architecture(msgspec.Struct, frozen=True):
    #: Class name in config.json's `architectures`, and `model_type`.
    name: str
    model_type: str
    #: The converter interleaved the rows of q and k within each head (rope over neighbouring pairs).
    interleaved: bool


#: general.architecture -> what it is here.
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True),
}

#: GGUF name without ".weight" or ".bias" -> the same in the Hugging Face dialect; {} is the layer.
NAMES: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}

#: Rope factors of Llama 3, [head_dim / 2] float32 that divide the frequencies; keeps its name.
ROPE_FACTORS: Final = "rope_freqs.weight"

_LAYER = re.compile(r"^blk\.(\d+)\.")


def translate(name: str) -> str:
    """The tensor's name in the Hugging Face dialect; a name that has none there stays as it is."""
    base, _, kind = name.rpartition(".")
    layer = _LAYER.match(base)
    pattern = _LAYER.sub("blk.{}.", base)
    known = NAMES.get(pattern) if kind in ("weight", "bias") else None
    if known is None:
        return name
    return f"{known.format(layer[1] if layer else '')}.{kind}"


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    name = metadata.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise CheckpointError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return known


def make_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """config.json's equivalent. `shapes` of the tensors, by their translated names."""
    known = architecture(metadata)
    keys = _Keys(metadata, metadata["general.architecture"])
    if keys.get("expert_count", 0):
        raise CheckpointError("a GGUF file with a mixture of experts (expert_count > 0) is not supported")
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"GGUF head size {head_dim} is odd; rotary embeddings need pairs")
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise CheckpointError("GGUF keys and values have different head sizes; that is not supported")
    if keys.size("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError("a GGUF file that rotates only part of each head is not supported")
    embedding = shapes.get("model.embed_tokens.weight")
    config: dict[str, Any] = {
        "architectures": [known.name],
        "model_type": known.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.size("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "max_position_embeddings": keys.size("context_length"),
        "vocab_size": embedding[0] if embedding else keys.size("vocab_size"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": _has_bias(shapes, "self_attn"),
        "mlp_bias": _has_bias(shapes, "mlp"),
    }
    scaling = _rope_scaling(keys, ROPE_FACTORS in shapes)
    if scaling:
        config["rope_scaling"] = scaling
    return config | _special_ids(metadata, ("bos", "eos"))


def make_generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json's equivalent: every id that ends a turn, the first being the tokenizer's own EOS."""
    ids = _special_ids(metadata, ("bos", "eos", "eot", "eom"))
    ends = list(dict.fromkeys(ids[f"{name}_token_id"] for name in ("eos", "eot", "eom") if f"{name}_token_id" in ids))
    generation: dict[str, Any] = {"bos_token_id": ids["bos_token_id"]} if "bos_token_id" in ids else {}
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return generation


def _special_ids(metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        if value is None:
            continue
        if type(value) is not int:
            raise CheckpointError(f"GGUF key {key} is {value!r}; expected a token id")
        found[f"{name}_token_id"] = value
    return found


def _has_bias(shapes: Mapping[str, tuple[int, ...]], part: str) -> bool:
    return any(name.endswith(".bias") and f".{part}." in name for name in shapes)


def _rope_scaling(keys: _Keys, factors: bool) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    if factors:
        if kind not in ("none", "linear") or keys.get("rope.scaling.factor", 1.0) != 1.0:
            raise CheckpointError(f"GGUF rope factors together with rope scaling {kind!r} are not supported")
        return {"rope_type": "gguf_factors"}
    if kind == "none":
        linear = keys.number("rope.scale_linear", 1.0)
        return {"rope_type": "linear", "factor": linear} if linear != 1.0 else None
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    if kind == "yarn":
        for key in ("alpha", "attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            if keys.get(f"rope.scaling.{key}", 1.0) != 1.0:
                raise CheckpointError(f"GGUF rope scaling yarn with {key} other than 1 is not supported")
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if keys.get(f"rope.scaling.{key}") is not None:
                scaling[name] = keys.number(f"rope.scaling.{key}")
        return scaling
    raise CheckpointError(f"GGUF rope scaling {kind!r} is not supported; supported: none, linear, yarn")


class _Keys:
    """The metadata of one architecture, with its prefix left out."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # one number a layer, all alike
        if type(value) is not int or value < 1:
            raise CheckpointError(self._wrong(key, value, "one positive integer for all layers"))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(self._wrong(key, value, "a positive number"))
        return _shortest(float(value))

    def _wrong(self, key: str, value: Any, wanted: str) -> str:
        state = "is missing" if value is None else f"is {value!r}"
        return f"GGUF key {self._prefix}.{key} {state}; expected {wanted}"


def _shortest(value: float) -> float:
    """The decimal that was meant: a float32 of 1e-5 comes back as 9.999999747378752e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if ctypes.c_float(short).value == value:
            return short
    return value
