"""Llama and what follows its layout: Llama 2 and 3, TinyLlama, SmolLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.model import DecoderModel, ModelKit, ModelNeed, ModelOutput, ModelSpec, StepContext
from pegboard.contracts.ops import Ops
from pegboard.contracts.quantizer import LinearSpec
from pegboard.dtypes import torch_dtype

from .config import ModelConfig, Positive, Size
from .decoder import Decoder, DecoderLayer
from .loading import Loader
from .rope import make_rope, rope_refusals

_SUPPORTED_ACTIVATIONS = ("silu",)
_ROPE_FACTORS = "rope_freqs.weight"


class LlamaConfig(ModelConfig):
    """config.json of a Llama, by its own names."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    vocab_size: Size
    head_dim: Size | None = None
    max_position_embeddings: Size = 2048
    rms_norm_eps: Positive = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


def _linears(shape: LlamaConfig) -> list[LinearSpec]:
    specs = []
    kv = shape.kv_heads * shape.head_size
    for index in range(shape.num_hidden_layers):
        at = f"model.layers.{index}"
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        specs += [
            LinearSpec(
                name=f"{attn}.qkv_proj",
                sources=(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
                in_features=shape.hidden_size,
                out_features=(shape.num_attention_heads * shape.head_size, kv, kv),
                bias=shape.attention_bias,
                partition="output",
                unit=shape.head_size,
            ),
            LinearSpec(
                name=f"{attn}.o_proj",
                sources=(f"{attn}.o_proj",),
                in_features=shape.num_attention_heads * shape.head_size,
                out_features=(shape.hidden_size,),
                bias=shape.attention_bias,
                partition="input",
                unit=shape.head_size,
            ),
            LinearSpec(
                name=f"{mlp}.gate_up_proj",
                sources=(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                in_features=shape.hidden_size,
                out_features=(shape.intermediate_size, shape.intermediate_size),
                bias=shape.mlp_bias,
                partition="output",
            ),
            LinearSpec(
                name=f"{mlp}.down_proj",
                sources=(f"{mlp}.down_proj",),
                in_features=shape.intermediate_size,
                out_features=(shape.hidden_size,),
                bias=shape.mlp_bias,
                partition="input",
            ),
        ]
    specs.append(
        LinearSpec(
            name="lm_head",
            sources=("model.embed_tokens" if shape.tie_word_embeddings else "lm_head",),
            in_features=shape.hidden_size,
            out_features=(shape.vocab_size,),
            partition="output",
            tied=shape.tie_word_embeddings,
        )
    )
    return specs


def _vectors(shape: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that are no linear."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size)}
    for index in range(shape.num_hidden_layers):
        named[f"model.layers.{index}.input_layernorm.weight"] = (shape.hidden_size,)
        named[f"model.layers.{index}.post_attention_layernorm.weight"] = (shape.hidden_size,)
    named["model.norm.weight"] = (shape.hidden_size,)
    return named


class Llama(DecoderModel):
    """RMS norms, rotary attention with grouped heads, SiLU-gated MLP (Touvron et al. 2023)."""

    def __init__(self, decoder: Decoder, weight_bytes: int) -> None:
        self._decoder = decoder
        self._weight_bytes = weight_bytes

    @classmethod
    def refusals(cls, need: ModelNeed, options: Any) -> Sequence[str]:
        problems, reasons = LlamaConfig.problems(need.config), rope_refusals(need.config)
        if problems:
            return [*problems, *reasons]
        shape = LlamaConfig.read(need.config)
        if shape.num_attention_heads % shape.kv_heads:
            reasons.append(
                f"{shape.num_attention_heads} attention heads are not a multiple of {shape.kv_heads} key-value heads"
            )
        if shape.head_size % 2:
            reasons.append(f"head size {shape.head_size} is odd; rotary embedding needs an even one")
        if shape.hidden_act not in _SUPPORTED_ACTIVATIONS:
            supported = ", ".join(_SUPPORTED_ACTIVATIONS)
            reasons.append(f"activation {shape.hidden_act!r} is not supported; supported: {supported}")
        if shape.kv_heads % need.shard_size or shape.intermediate_size % need.shard_size:
            reasons.append(f"{shape.kv_heads} key-value heads can't be split over {need.shard_size} ranks")
        return reasons

    @classmethod
    def describe(cls, need: ModelNeed) -> ModelSpec:
        shape = LlamaConfig.read(need.config)
        layer = AttentionLayer(
            query_heads=shape.num_attention_heads // need.shard_size,
            kv_heads=shape.kv_heads // need.shard_size,
            head_size=shape.head_size,
            scale=shape.head_size**-0.5,
        )
        # A tied head is the embedding: its bytes are counted once, with the linears.
        others = (0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size) + (
            2 * shape.num_hidden_layers + 1
        ) * shape.hidden_size
        qkv = (shape.num_attention_heads + 2 * shape.kv_heads) * shape.head_size
        return ModelSpec(
            architecture="LlamaForCausalLM",
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            layers=(layer,) * shape.num_hidden_layers,
            context_length=shape.max_position_embeddings,
            linears=tuple(_linears(shape)),
            other_parameters=others,
            activations=("silu",),
            activation_width=4 * shape.hidden_size + 2 * qkv + 3 * shape.intermediate_size,
        )

    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        shape, loader = LlamaConfig.read(kit.config), Loader(kit)
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
        for index in range(shape.num_hidden_layers):
            at = f"model.layers.{index}"
            layers.append(
                DecoderLayer(
                    index=index,
                    heads=(attention.query_heads, attention.kv_heads, attention.head_size),
                    rope=rope,
                    activation="silu",
                    input_norm=loader.norm(f"{at}.input_layernorm.weight", shape.rms_norm_eps),
                    qkv=linears[f"{at}.self_attn.qkv_proj"],
                    o=linears[f"{at}.self_attn.o_proj"],
                    mlp_norm=loader.norm(f"{at}.post_attention_layernorm.weight", shape.rms_norm_eps),
                    gate_up=linears[f"{at}.mlp.gate_up_proj"],
                    down=linears[f"{at}.mlp.down_proj"],
                )
            )
        head = linears["lm_head"]
        # A dense tied head is the embedding itself; a packed or a split one is not.
        shared = head.weight if shape.tie_word_embeddings and kit.shard.size == 1 else None
        table = loader.tensor("model.embed_tokens.weight") if shared is None else shared
        decoder = Decoder(
            embedding=table,
            layers=tuple(layers),
            norm=loader.norm("model.norm.weight", shape.rms_norm_eps),
            head=head,
            taps=kit.taps,
            gather=kit.shard.all_gather if kit.shard.size > 1 else None,
        )
        loader.report_unused()
        others = kit.spec.other_parameters * dtype.itemsize
        if shape.tie_word_embeddings and shared is None:
            others += table.nbytes
        return cls(decoder, others + sum(linear.weight_bytes for linear in linears.values()))

    def forward(self, context: StepContext) -> ModelOutput:
        return self._decoder.forward(context)

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        return self._decoder.logits(hidden, ops)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes
