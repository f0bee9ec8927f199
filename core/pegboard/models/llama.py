"""Llama and what follows its layout: Llama 2 and 3, TinyLlama, SmolLM. Its relatives differ by their configs only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from pegboard.contracts.model import DecoderModel, ModelKit, ModelNeed, ModelOutput, ModelSpec, StepContext
from pegboard.contracts.ops import Activation, Ops

from .config import ModelConfig, Positive, Size
from .decoder import Decoder
from .experts import Experts
from .layout import Layout, build
from .rope import is_no_table, rope_reach, rope_refusals, rotary_size

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

FULL, SLIDING = "full_attention", "sliding_attention"


class LlamaConfig(ModelConfig):
    """config.json of a Llama, by its own names, and the base of its relatives'."""

    absent = {"max_position_embeddings": 2048}
    architecture: ClassVar[str] = "LlamaForCausalLM"
    #: Fields that would change the result and that this architecture hasn't, with the value that changes nothing.
    without: ClassVar[Mapping[str, Any]] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    #: Whether a part of each head may stay unturned.
    partial_rotary: ClassVar[bool] = False

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    vocab_size: Size
    head_dim: Size | None = None
    max_position_embeddings: Size
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

    @property
    def activation(self) -> str:
        return self.hidden_act

    @property
    def window(self) -> int | None:
        """Of layers with a window."""
        return None

    def layer_kinds(self) -> list[str]:
        """FULL or SLIDING, one a layer."""
        return [FULL if self.window is None else SLIDING] * self.num_hidden_layers

    @classmethod
    def ropes(cls, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """What `make_rope` reads for layers that see all, and for layers with a window."""
        return config, config

    def layout(self, config: Mapping[str, Any]) -> Layout:
        """`config` is the whole and complete one, for its rope."""
        rope, window_rope = self.ropes(config)
        return Layout(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            heads=self.num_attention_heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            scale=self.head_size**-0.5,
            rotary_size=rotary_size(rope, self.head_size),
            windows=tuple(self.window if kind == SLIDING else None for kind in self.layer_kinds()),
            rope=rope,
            window_rope=window_rope,
            activation=_ACTIVATIONS[self.activation],
            eps=self.rms_norm_eps,
            tied=self.tie_word_embeddings,
            context_length=rope_reach(rope),
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
        )

    @classmethod
    def rope_reasons(cls, config: Mapping[str, Any], head_size: int | None) -> list[str]:
        reasons = is_no_table(config)
        if reasons:
            return reasons
        for rope in cls.ropes(config):
            size = None if head_size is None else rotary_size(rope, head_size)
            reasons += rope_refusals(rope, size)
            if size is not None and size != head_size and not cls.partial_rotary:
                reasons.append(f"partial_rotary_factor is not supported: {cls.architecture} turns whole heads")
            elif size is not None and (size < 2 or size % 2):
                reasons.append(
                    f"{size} dimensions of a head of size {head_size} turn; rotary embedding needs an even number "
                    "(head size times partial_rotary_factor, which is above 0 and at most 1)"
                )
        return list(dict.fromkeys(reasons))

    def reasons(self, config: Mapping[str, Any]) -> list[str]:
        """Why a config whose fields are valid can't be served."""
        reasons = [
            f"{field} is {config[field]!r} in config.json; {self.architecture} is supported without it"
            for field, nothing in self.without.items()
            if config.get(field) is not None and config[field] != nothing
        ]
        if self.num_attention_heads % self.kv_heads:
            reasons.append(
                f"{self.num_attention_heads} attention heads are not a multiple of {self.kv_heads} key-value heads"
            )
        if self.activation not in _ACTIVATIONS:
            reasons.append(f"activation {self.activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return reasons + self._kind_reasons(config)

    def _kind_reasons(self, config: Mapping[str, Any]) -> list[str]:
        kinds, stated = self.layer_kinds(), config.get("layer_types")
        if stated is not None and stated != kinds:
            return [f"layer_types is not supported: {self.architecture} has layers of one kind, here {kinds[0]}"]
        if len(kinds) != self.num_hidden_layers:
            return [f"layer_types names {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}"]
        unknown = sorted(set(kinds) - {FULL, SLIDING})
        if unknown:
            return [f"layer_types: {', '.join(unknown)} is not supported; supported: {FULL}, {SLIDING}"]
        if SLIDING in kinds and self.window is None:
            return [f"{SLIDING} in layer_types needs a sliding_window; there is none"]
        return []


class Llama(DecoderModel):
    """RMS norms, rotary attention with grouped heads, gated MLP (Touvron et al. 2023). A relative is a subclass with
    the config that says how it differs."""

    config_type: ClassVar[type[LlamaConfig]] = LlamaConfig
    shares_ends = True

    def __init__(self, decoder: Decoder, weight_bytes: int, unused_tensors: tuple[str, ...]) -> None:
        self._decoder = decoder
        #: Tokens are grouped by expert on the host.
        self.capturable = not any(isinstance(layer.mlp, Experts) for layer in decoder.layers)
        self._weight_bytes = weight_bytes
        self._unused_tensors = unused_tensors

    @classmethod
    def refusals(cls, need: ModelNeed, options: Any) -> Sequence[str]:
        config, kind = cls.config_type.complete(need.config), cls.config_type
        problems = kind.problems(config)
        if problems:
            return [*problems, *kind.rope_reasons(config, None)]
        shape = kind.read(config)
        reasons = [*kind.rope_reasons(config, shape.head_size), *shape.reasons(config)]
        if need.shard_size > 1 and not reasons:
            layout = shape.layout(config)
            if layout.experts is not None:
                reasons.append(f"the experts of {kind.architecture} can't be split over ranks")
            elif layout.fused:
                reasons.append(f"the fused projections of {kind.architecture} can't be split over ranks")
            elif layout.kv_heads % need.shard_size or layout.intermediate_size % need.shard_size:
                reasons.append(f"{layout.kv_heads} key-value heads can't be split over {need.shard_size} ranks")
        return reasons

    @classmethod
    def layout(cls, raw: Mapping[str, Any]) -> Layout:
        """What the model of this config.json is made of. CheckpointError: the config is not valid."""
        config = cls.config_type.complete(raw)
        return cls.config_type.read(config).layout(config)

    @classmethod
    def describe(cls, need: ModelNeed) -> ModelSpec:
        layout = cls.layout(need.config)
        return ModelSpec(
            architecture=cls.config_type.architecture,
            vocab_size=layout.vocab_size,
            hidden_size=layout.hidden_size,
            layers=layout.attention(need.shard_size),
            context_length=layout.context_length,
            linears=tuple(layout.linears()),
            other_parameters=layout.other_parameters(),
            activations=(layout.activation,),
            activation_width=layout.activation_width(),
        )

    @classmethod
    def create(cls, kit: ModelKit) -> Self:
        decoder, linears, unused = build(cls.layout(kit.config), kit)
        others = kit.spec.other_parameters * decoder.embedding.element_size()
        if kit.spec.linears[-1].tied and decoder.head.weight is not decoder.embedding:
            others += decoder.embedding.nbytes  # a packed head does not serve as the table
        return cls(decoder, others + sum(linear.weight_bytes for linear in linears.values()), unused)

    def forward(self, context: StepContext) -> ModelOutput:
        return self._decoder.forward(context)

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        return self._decoder.logits(hidden, ops, self._decoder.norm)

    def embed(self, ids: Tensor, ops: Ops) -> Tensor:
        return self._decoder.embed(ids, ops)

    def final(self, hidden: Tensor, ops: Ops) -> Tensor:
        return ops.norm(hidden, self._decoder.norm)

    def head(self, final: Tensor, ops: Ops) -> Tensor:
        return self._decoder.logits(final, ops, None)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        return self._unused_tensors
