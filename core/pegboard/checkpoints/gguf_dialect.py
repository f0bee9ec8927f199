"""GGUF metadata and tensor names, told in the Hugging Face dialect.

To add an architecture: an entry in ARCHITECTURES, and in NAMES if its tensors have names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from pegboard.errors import CheckpointError

from .gguf_keys import ArchitectureKeys

#: GGUF name without ".weight" or ".bias" -> the same in the Hugging Face dialect; {} is the layer.
NAMES: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}

#: Where norms stand on both sides of attention and MLP.
_POST_NORMS: Final[Mapping[str, str]] = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}


class Architecture(msgspec.Struct, frozen=True):
    #: Class name in config.json's `architectures`, and `model_type`.
    name: str
    model_type: str
    #: The converter interleaved the rows of q and k within each head (rope over neighbouring pairs).
    interleaved: bool = False
    #: What the converter added to the weights of norms.
    norm_offset: float = 0.0
    #: May carry a tensor of rope factors.
    rope_factors: bool = False
    #: Where they differ from NAMES.
    names: Mapping[str, str] = {}


#: general.architecture -> what it is here.
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True, rope_factors=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", norm_offset=1.0, names=_POST_NORMS),
}

#: Rope factors of Llama 3, [head_dim / 2] float32 that divide the frequencies; keeps its name.
ROPE_FACTORS: Final = "rope_freqs.weight"

#: What chat models call the end of a turn.
ENDS_OF_TURN: Final = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")

#: Token type of special tokens.
_CONTROL: Final = 3

_LAYER = re.compile(r"^blk\.(\d+)\.")


def translate(name: str, known: Architecture) -> str:
    """The tensor's name in the Hugging Face dialect; a name that has none there stays as it is."""
    base, _, kind = name.rpartition(".")
    layer = _LAYER.match(base)
    pattern = _LAYER.sub("blk.{}.", base)
    theirs = known.names.get(pattern, NAMES.get(pattern)) if kind in ("weight", "bias") else None
    if theirs is None:
        return name
    return f"{theirs.format(layer[1] if layer else '')}.{kind}"


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    name = metadata.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise CheckpointError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return known


def make_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """config.json's equivalent. `shapes` of the tensors, by their translated names."""
    known = architecture(metadata)
    keys = ArchitectureKeys(metadata, metadata["general.architecture"])
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
    if keys.get("attention.causal", True) is not True:
        raise CheckpointError("a GGUF file of a model that sees the text after a token is not supported")
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
    if ROPE_FACTORS in shapes and not known.rope_factors:
        raise CheckpointError(f"{ROPE_FACTORS} in a GGUF file of {known.model_type} is not supported")
    scaling = _rope_scaling(keys, ROPE_FACTORS in shapes)
    if scaling:
        config["rope_scaling"] = scaling
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.get(key):  # whether the model has it is the model's to say
            config[key] = keys.number(key)
    if known.model_type == "gemma3_text":
        config |= _gemma3(keys, config)
    _refuse_unserved(keys, config)
    return config | _special_ids(metadata, ("bos", "eos"))


def _gemma3(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has. Of what the format leaves unsaid, its reference implementation decides: every sixth
    layer sees all, layers with a window turn with base 10000, and 62 layers mean the 27B model, whose scale of the
    scores is that of hidden size / heads."""
    layers, window = config["num_hidden_layers"], keys.get("attention.sliding_window", 0)
    divided = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    scale = keys.get("attention.scale", 0.0)
    gemma: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": keys.number("attention.scale") ** -2 if scale else divided,
    }
    if not window:
        return {**gemma, "layer_types": ["full_attention"] * layers}
    pattern = keys.get("attention.sliding_window_pattern", 6)
    if type(pattern) is int and pattern >= 1:
        windowed = [(index + 1) % pattern != 0 for index in range(layers)]
    elif isinstance(pattern, list) and len(pattern) == layers and all(type(value) is bool for value in pattern):
        windowed = pattern
    else:
        raise keys.wrong("attention.sliding_window_pattern", f"a period of layers, or one boolean for each of {layers}")
    kinds = ["sliding_attention" if value else "full_attention" for value in windowed]
    return {**gemma, "sliding_window": keys.size("attention.sliding_window"), "layer_types": kinds}


def _refuse_unserved(keys: ArchitectureKeys, config: Mapping[str, Any]) -> None:
    """Keys that would change the result, which the models here don't have: never accepted and ignored."""
    gemma = config["model_type"] == "gemma3_text"
    head_dim = config["head_dim"]
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        if keys.get(key, head_dim) != head_dim:
            raise keys.wrong(key, f"the head size {head_dim}: layers of several head sizes are not supported")
    for key in ("logit_scale", "embedding_scale", "residual_scale"):
        if keys.get(key, 1.0) not in (0.0, 1.0):
            raise keys.wrong(key, "1: such a scale is not supported")
    if not gemma and keys.get("attention.scale") and abs(keys.number("attention.scale") * head_dim**0.5 - 1) > 1e-5:
        raise keys.wrong("attention.scale", "1 / sqrt(head size): another scale is not supported")
    window = keys.get("attention.sliding_window")
    if not gemma and window and keys.size("attention.sliding_window") < config["max_position_embeddings"]:
        raise keys.wrong("attention.sliding_window", "none: a window in this architecture is not supported")


def make_generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json's equivalent: every id that ends a turn, the first being the tokenizer's own EOS.

    A file that names no end of turn may still have one among its control tokens, as chat models do: it counts."""
    ids = _special_ids(metadata, ("bos", "eos", "eot", "eom"))
    if "eot_token_id" not in ids:
        found = _end_of_turn(metadata)
        ids |= {} if found is None else {"eot_token_id": found}
    ends = list(dict.fromkeys(ids[f"{name}_token_id"] for name in ("eos", "eot", "eom") if f"{name}_token_id" in ids))
    generation: dict[str, Any] = {"bos_token_id": ids["bos_token_id"]} if "bos_token_id" in ids else {}
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return generation


def _end_of_turn(metadata: Mapping[str, Any]) -> int | None:
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        for token in ENDS_OF_TURN:
            at = tokens.index(token) if token in tokens else len(types)
            if at < len(types) and types[at] == _CONTROL:
                return at
    return None


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


def _rope_scaling(keys: ArchitectureKeys, factors: bool) -> dict[str, Any] | None:
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
