"""What a decoder of Llama's layout is made of, by numbers and switches, and how it is built from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from pegboard.contracts.attention import AttentionLayer
from pegboard.contracts.model import ModelKit
from pegboard.contracts.ops import Activation, Norm
from pegboard.contracts.quantizer import Linear, LinearSpec
from pegboard.dtypes import torch_dtype

from .decoder import Decoder, DecoderLayer, GatedMLP
from .experts import ExpertLayout, Experts
from .loading import Loader
from .rope import make_rope

_ROPE_FACTORS = "rope_freqs.weight"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A pre-norm decoder with rotary attention and a gated MLP. The defaults are Llama's."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_size: int
    #: Multiplies q . k
    scale: float
    #: Dimensions of a head that turn.
    rotary_size: int
    #: One a layer: how many entries a query sees, its own included; None: all.
    windows: tuple[int | None, ...]
    #: What `make_rope` reads, for layers that see all and for layers with a window.
    rope: Mapping[str, Any]
    window_rope: Mapping[str, Any]
    activation: Activation
    eps: float
    tied: bool
    context_length: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    #: q, k and v are stored as one matrix, gate and up as another.
    fused: bool = False
    #: q and k are normed by head.
    head_norms: bool = False
    #: What attention and MLP give is normed before the residual is added.
    post_norms: bool = False
    norm_offset: float = 0.0
    #: See `Norm.round_first`.
    norm_rounds_first: bool = True
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    #: In place of the MLP, in the layers that it names.
    experts: ExpertLayout | None = None

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        kv = self.kv_heads * self.head_size
        return self.heads * self.head_size, kv, kv

    @property
    def mlp_norm(self) -> str:
        """Llama named the norm before the MLP by what comes before it."""
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    def attention(self, shards: int) -> tuple[AttentionLayer, ...]:
        """One a layer, with the heads of one of `shards` ranks."""
        return tuple(
            AttentionLayer(
                query_heads=self.heads // shards,
                kv_heads=self.kv_heads // shards,
                head_size=self.head_size,
                scale=self.scale,
                window=window,
            )
            for window in self.windows
        )

    def linears(self) -> list[LinearSpec]:
        specs = [spec for index in range(len(self.windows)) for spec in self._layer_linears(index)]
        specs.append(
            LinearSpec(
                name="lm_head",
                sources=("model.embed_tokens" if self.tied else "lm_head",),
                in_features=self.hidden_size,
                out_features=(self.vocab_size,),
                partition="output",
                tied=self.tied,
            )
        )
        return specs

    def _layer_linears(self, index: int) -> list[LinearSpec]:
        attn, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        attention = [
            LinearSpec(
                name=f"{attn}.qkv_proj",
                sources=(f"{attn}.qkv_proj",) if self.fused else tuple(f"{attn}.{x}_proj" for x in "qkv"),
                in_features=self.hidden_size,
                out_features=(sum(self.qkv_sizes),) if self.fused else self.qkv_sizes,
                bias=self.qkv_bias,
                partition="output",
                unit=self.head_size,
            ),
            LinearSpec(
                name=f"{attn}.o_proj",
                sources=(f"{attn}.o_proj",),
                in_features=self.heads * self.head_size,
                out_features=(self.hidden_size,),
                bias=self.o_bias,
                partition="input",
                unit=self.head_size,
            ),
        ]
        if self.experts is not None and index in self.experts.layers:
            return attention + self.experts.linears(index, self.hidden_size)
        return [
            *attention,
            LinearSpec(
                name=f"{mlp}.gate_up_proj",
                sources=(f"{mlp}.gate_up_proj",) if self.fused else (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                in_features=self.hidden_size,
                out_features=(2 * self.intermediate_size,) if self.fused else (self.intermediate_size,) * 2,
                bias=self.mlp_bias,
                partition="output",
            ),
            LinearSpec(
                name=f"{mlp}.down_proj",
                sources=(f"{mlp}.down_proj",),
                in_features=self.intermediate_size,
                out_features=(self.hidden_size,),
                bias=self.mlp_bias,
                partition="input",
            ),
        ]

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that are no linear."""
        named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for index in range(len(self.windows)):
            at = f"model.layers.{index}"
            named |= {f"{at}.{norm}.weight": (self.hidden_size,) for norm in norms}
            if self.head_norms:
                named |= {f"{at}.self_attn.{norm}.weight": (self.head_size,) for norm in ("q_norm", "k_norm")}
        named["model.norm.weight"] = (self.hidden_size,)
        return named

    def other_parameters(self) -> int:
        """Numbers in `vectors`; a tied head is the embedding, and counted with the linears."""
        total = sum(math.prod(shape) for shape in self.vectors().values())
        return total - self.vocab_size * self.hidden_size if self.tied else total

    def activation_width(self) -> int:
        width = 4 * self.hidden_size + 2 * sum(self.qkv_sizes) + 3 * self.intermediate_size
        if self.experts is None:
            return width
        return width + self.experts.per_token * (3 * self.hidden_size + 3 * self.experts.intermediate_size)


def build(layout: Layout, kit: ModelKit) -> tuple[Decoder, dict[str, Linear], tuple[str, ...]]:
    """The decoder, its linears by name, and the names of tensors that nothing used.

    CheckpointError names every missing or wrong-shaped tensor at once."""
    loader = Loader(kit)
    vectors = layout.vectors()
    if _ROPE_FACTORS in kit.checkpoint.tensors():
        vectors[_ROPE_FACTORS] = (layout.rotary_size // 2,)
    loader.check(kit.spec.linears, vectors)
    linears = loader.linears(kit.spec.linears)
    dtype = torch_dtype(kit.dtype)
    factors = kit.checkpoint.read(_ROPE_FACTORS, dtype="float32") if _ROPE_FACTORS in vectors else None

    def norm(name: str) -> Norm:
        return loader.norm(
            f"{name}.weight", layout.eps, offset=layout.norm_offset, round_first=layout.norm_rounds_first
        )

    used = {window is not None for window in layout.windows}
    ropes = {
        windowed: make_rope(
            layout.window_rope if windowed else layout.rope,
            layout.rotary_size,
            kit.max_length,
            device=kit.device,
            dtype=dtype,
            factors=factors,
        )
        for windowed in used
    }
    layers = []
    for index, attention in enumerate(layout.attention(kit.shard.size)):
        at = f"model.layers.{index}"
        layers.append(
            DecoderLayer(
                index=index,
                heads=(attention.query_heads, attention.kv_heads, attention.head_size),
                rope=ropes[attention.window is not None],
                input_norm=norm(f"{at}.input_layernorm"),
                qkv=linears[f"{at}.self_attn.qkv_proj"],
                q_norm=norm(f"{at}.self_attn.q_norm") if layout.head_norms else None,
                k_norm=norm(f"{at}.self_attn.k_norm") if layout.head_norms else None,
                o=linears[f"{at}.self_attn.o_proj"],
                post_attention_norm=norm(f"{at}.post_attention_layernorm") if layout.post_norms else None,
                mlp_norm=norm(f"{at}.{layout.mlp_norm}"),
                mlp=_mlp(layout, index, linears),
                post_mlp_norm=norm(f"{at}.post_feedforward_layernorm") if layout.post_norms else None,
            )
        )
    head = linears["lm_head"]
    # A dense tied head is the embedding itself; a packed or a split one is not.
    shared = head.weight if layout.tied and kit.shard.size == 1 else None
    scale = layout.embedding_scale
    decoder = Decoder(
        embedding=shared if shared is not None else loader.tensor("model.embed_tokens.weight"),
        embedding_scale=None if scale is None else rounded(scale, dtype),
        layers=tuple(layers),
        norm=norm("model.norm"),
        head=head,
        logit_softcap=layout.logit_softcap,
        taps=kit.taps,
        gather=kit.shard.all_gather if kit.shard.size > 1 else None,
    )
    return decoder, linears, loader.unused()


def _mlp(layout: Layout, index: int, linears: dict[str, Linear]) -> GatedMLP | Experts:
    if layout.experts is not None and index in layout.experts.layers:
        return layout.experts.build(index, linears, layout.activation)
    at = f"model.layers.{index}.mlp"
    return GatedMLP(
        activation=layout.activation, gate_up=linears[f"{at}.gate_up_proj"], down=linears[f"{at}.down_proj"]
    )


def rounded(value: float, dtype: torch.dtype) -> float:
    """As a checkpoint's own code holds a constant: in float32, then in the dtype of the weights."""
    return float(torch.tensor(value, dtype=torch.float32).to(dtype))
