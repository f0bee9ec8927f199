"""Llama and what follows its layout: Llama 2 and 3, TinyLlama, SmolLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
from torch import Tensor

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.model import DecoderModel, ModelKit, ModelNeed, ModelOutput, ModelSpec, StepContext
from pegboard.contracts.ops import Ops
from pegboard.contracts.quantizer import LinearSpec
from pegboard.dtypes import torch_dtype

from .decoder import Decoder, DecoderLayer
from .loading import Loader
from .rope import make_rope, rope_refusals

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SUPPORTED_ACTIVATIONS = ("silu",)
_ROPE_FACTORS = "rope_freqs.weight"


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The config's numbers, with its defaults filled in."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    context: int
    eps: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool


def _shape(config: Mapping[str, Any]) -> _Shape:
    heads = config["num_attention_heads"]
    return _Shape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        context=config.get("max_position_embeddings") or 2048,
        eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _linears(shape: _Shape) -> list[LinearSpec]:
    specs = []
    kv = shape.kv_heads * shape.head_size
    for index in range(shape.layers):
        at = f"model.layers.{index}"
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        specs += [
            LinearSpec(
                name=f"{attn}.qkv_proj",
                sources=(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
                in_features=shape.hidden,
                out_features=(shape.heads * shape.head_size, kv, kv),
                bias=shape.attention_bias,
                partition="output",
                unit=shape.head_size,
            ),
            LinearSpec(
                name=f"{attn}.o_proj",
                sources=(f"{attn}.o_proj",),
                in_features=shape.heads * shape.head_size,
                out_features=(shape.hidden,),
                bias=shape.attention_bias,
                partition="input",
                unit=shape.head_size,
            ),
            LinearSpec(
                name=f"{mlp}.gate_up_proj",
                sources=(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                in_features=shape.hidden,
                out_features=(shape.intermediate, shape.intermediate),
                bias=shape.mlp_bias,
                partition="output",
            ),
            LinearSpec(
                name=f"{mlp}.down_proj",
                sources=(f"{mlp}.down_proj",),
                in_features=shape.intermediate,
                out_features=(shape.hidden,),
                bias=shape.mlp_bias,
                partition="input",
            ),
        ]
    specs.append(
        LinearSpec(
            name="lm_head",
            sources=("model.embed_tokens" if shape.tied else "lm_head",),
            in_features=shape.hidden,
            out_features=(shape.vocab,),
            partition="output",
        )
    )
    return specs


def _vectors(shape: _Shape) -> dict[str, tuple[int, ...]]:
    """The tensors that are no linear."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for index in range(shape.layers):
        named[f"model.layers.{index}.input_layernorm.weight"] = (shape.hidden,)
        named[f"model.layers.{index}.post_attention_layernorm.weight"] = (shape.hidden,)
    named["model.norm.weight"] = (shape.hidden,)
    return named


class Llama(DecoderModel):
    """RMS norms, rotary attention with grouped heads, SiLU-gated MLP (Touvron et al. 2023)."""

    def __init__(self, decoder: Decoder, weight_bytes: int) -> None:
        self._decoder = decoder
        self._weight_bytes = weight_bytes

    @classmethod
    def refusals(cls, need: ModelNeed, options: Any) -> Sequence[str]:
        config = need.config
        missing = [f"config.json lacks {key!r}" for key in _REQUIRED if not isinstance(config.get(key), int)]
        if missing:
            return missing
        shape, reasons = _shape(config), rope_refusals(config)
        if min(shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.vocab) < 1:
            return ["config.json has a size below 1"]
        if shape.heads % shape.kv_heads:
            reasons.append(f"{shape.heads} attention heads are not a multiple of {shape.kv_heads} key-value heads")
        if shape.head_size % 2:
            reasons.append(f"head size {shape.head_size} is odd; rotary embedding needs an even one")
        activation = config.get("hidden_act", "silu")
        if activation not in _SUPPORTED_ACTIVATIONS:
            reasons.append(
                f"activation {activation!r} is not supported; supported: {', '.join(_SUPPORTED_ACTIVATIONS)}"
            )
        if shape.kv_heads % need.shard_size or shape.intermediate % need.shard_size:
            reasons.append(f"{shape.kv_heads} key-value heads can't be split over {need.shard_size} ranks")
        return reasons

    @classmethod
    def describe(cls, need: ModelNeed) -> ModelSpec:
        shape = _shape(need.config)
        layer = AttentionLayer(
            query_heads=shape.heads // need.shard_size,
            kv_heads=shape.kv_heads // need.shard_size,
            head_size=shape.head_size,
            scale=shape.head_size**-0.5,
        )
        # A tied head is the embedding: its bytes are counted once, with the linears.
        others = (0 if shape.tied else shape.vocab * shape.hidden) + (2 * shape.layers + 1) * shape.hidden
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        return ModelSpec(
            architecture="LlamaForCausalLM",
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            layers=(layer,) * shape.layers,
            context_length=shape.context,
            linears=tuple(_linears(shape)),
            other_parameters=others,
            activations=("silu",),
            activation_width=4 * shape.hidden + 2 * qkv + 3 * shape.intermediate,
        )

    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        shape, loader = _shape(kit.config), Loader(kit)
        vectors = _vectors(shape)
        if _ROPE_FACTORS in kit.checkpoint.tensors():
            vectors[_ROPE_FACTORS] = (shape.head_size // 2,)
        loader.check(kit.spec.linears, vectors)
        linears = loader.linears(kit.spec.linears)
        dtype = torch_dtype(kit.dtype)
        factors = kit.checkpoint.read(_ROPE_FACTORS, dtype="float32") if _ROPE_FACTORS in vectors else None
        rope = make_rope(kit.config, shape.head_size, kit.max_length, device=kit.device, dtype=dtype, factors=factors)
        attention = kit.spec.layers[0]
        assert isinstance(attention, AttentionLayer)  # `describe` gives no other kind
        layers = []
        for index in range(shape.layers):
            at = f"model.layers.{index}"
            layers.append(
                DecoderLayer(
                    index=index,
                    heads=(attention.query_heads, attention.kv_heads, attention.head_size),
                    rope=rope,
                    activation="silu",
                    input_norm=loader.norm(f"{at}.input_layernorm.weight", shape.eps),
                    qkv=linears[f"{at}.self_attn.qkv_proj"],
                    o=linears[f"{at}.self_attn.o_proj"],
                    mlp_norm=loader.norm(f"{at}.post_attention_layernorm.weight", shape.eps),
                    gate_up=linears[f"{at}.mlp.gate_up_proj"],
                    down=linears[f"{at}.mlp.down_proj"],
                )
            )
        head = linears["lm_head"]
        # A dense tied head is the embedding itself; a packed or a split one is not.
        shared = head.weight if shape.tied and kit.shard.size == 1 else None
        decoder = Decoder(
            embedding=shared if shared is not None else loader.tensor("model.embed_tokens.weight"),
            layers=tuple(layers),
            norm=loader.norm("model.norm.weight", shape.eps),
            head=head,
            taps=kit.taps,
            gather=kit.shard.all_gather if kit.shard.size > 1 else None,
        )
        loader.report_unused()
        others = kit.spec.other_parameters * dtype.itemsize
        return cls(decoder, others + sum(linear.weight_bytes for linear in linears.values()))

    def forward(self, context: StepContext) -> ModelOutput:
        return self._decoder.forward(context)

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        return self._decoder.logits(hidden, ops)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes
