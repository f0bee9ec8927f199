"""The layer of EAGLE-1 (Li et al. 2024): files of it, and what it computes.

Letters: R rows, w entries of each, E hidden size, H query heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from pegboard import CheckpointError
from pegboard.contracts.model import ModelSpec
from pegboard.models.llama import LlamaConfig
from pegboard.models.rope import make_rope
from pegboard.ops.torch_ops import rotate

from .head_files import HeadFiles

_LAYER, _EMBEDDING = "layers.0", "embed_tokens.weight"
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "gelu": functional.gelu}

#: (q [R, w, H, D], k and v [R, w, K, D]) -> [R, w, H, D]: what is kept of k and v is the caller's matter.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class EagleShape(msgspec.Struct, frozen=True, kw_only=True):
    """Of a folder: config.json is a Llama's of one layer; safetensors has `fc.weight` [E, 2E], `layers.0.*` without the
    norm before attention, and where they are there the biases of fc, q, k and v, and `embed_tokens.weight`."""

    config: LlamaConfig
    #: For the rotary embedding.
    raw: Mapping[str, Any]
    #: Names and shapes of its tensors.
    tensors: Mapping[str, tuple[int, ...]]
    nbytes: int

    @classmethod
    def read(cls, files: HeadFiles, target: ModelSpec) -> Self:
        """CheckpointError: what is missing, or does not fit the target."""
        raw = LlamaConfig.complete(files.config)
        config = LlamaConfig.read(raw)
        reasons = [*config.reasons(raw), *config.rope_reasons(raw, config.head_size)]
        if config.num_hidden_layers != 1:
            reasons.append(f"num_hidden_layers is {config.num_hidden_layers}; EAGLE-1 has 1 layer")
        if config.activation not in _ACTIVATIONS:
            reasons.append(f"hidden_act is {config.activation!r}, must be one of {', '.join(_ACTIVATIONS)}")
        if config.hidden_size != target.hidden_size:
            reasons.append(f"hidden_size is {config.hidden_size}, that of the target {target.hidden_size}")
        if f"{_LAYER}.input_layernorm.weight" in files.tensors:
            reasons.append(
                f"{_LAYER}.input_layernorm.weight is there; the layer of EAGLE-1 has no norm before attention"
            )
        if reasons:
            raise CheckpointError(f"{files.path} does not fit:\n  - " + "\n  - ".join(reasons))
        wanted = shapes(config, target.vocab_size, {name for name in files.tensors if name in _OPTIONAL})
        files.check(wanted)
        stored = sum(files.tensors[name].nbytes for name in wanted)
        return cls(config=config, raw=raw, tensors=wanted, nbytes=stored)

    def cache_bytes(self, slots: int, entries: int, width: int) -> int:
        """Of keys and values in numbers of `width` bytes."""
        return 2 * slots * entries * self.config.kv_heads * self.config.head_size * width


_OPTIONAL = {_EMBEDDING, "fc.bias", *(f"{_LAYER}.self_attn.{part}_proj.bias" for part in "qkv")}


def shapes(config: LlamaConfig, vocab_size: int, optional: set[str]) -> dict[str, tuple[int, ...]]:
    """Of every tensor, and of those named in `optional`."""
    size, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_size, config.kv_heads * config.head_size
    attention, mlp = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 2 * size),
        f"{attention}.q_proj.weight": (queries, size),
        f"{attention}.k_proj.weight": (keys, size),
        f"{attention}.v_proj.weight": (keys, size),
        f"{attention}.o_proj.weight": (size, queries),
        f"{_LAYER}.post_attention_layernorm.weight": (size,),
        f"{mlp}.gate_proj.weight": (inner, size),
        f"{mlp}.up_proj.weight": (inner, size),
        f"{mlp}.down_proj.weight": (size, inner),
    }
    more = {_EMBEDDING: (vocab_size, size), "fc.bias": (size,), f"{attention}.q_proj.bias": (queries,)}
    more |= {f"{attention}.{part}_proj.bias": (keys,) for part in "kv"}
    return found | {name: shape for name, shape in more.items() if name in optional}


class EagleLayer:
    """Weights by their names in the file; `embedding` [V, E] or None, where the target's is used."""

    def __init__(self, config: LlamaConfig, raw: Mapping[str, Any], weights: Mapping[str, Tensor], length: int) -> None:
        """`length`: positions of the longest text."""
        self.config, self.weights = config, weights
        matrix = weights["fc.weight"]
        self._rope = make_rope(
            raw, config.layout(raw).rotary_size, length, device=str(matrix.device), dtype=matrix.dtype
        )

    @classmethod
    def load(cls, files: HeadFiles, shape: EagleShape, dtype: torch.dtype, device: torch.device, length: int) -> Self:
        weights = {name: files.read(name, dtype, device).clone() for name in shape.tensors}
        return cls(shape.config, shape.raw, weights, length)

    @property
    def embedding(self) -> Tensor | None:
        return self.weights.get(_EMBEDDING)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """embedded and hidden [R, w, E]: a token, and the state that it was chosen from; positions [R, w], those of the
        states -> [R, w, E]: what the target's state after that token is expected to be."""
        x = self._linear(torch.cat((embedded, hidden), -1), "fc")
        at, config = f"{_LAYER}.self_attn", self.config
        q, k, v = (self._linear(x, f"{at}.{part}_proj").view(*x.shape[:2], -1, config.head_size) for part in "qkv")
        flat = positions.flatten()
        q, k = (rotate(part.flatten(0, 1), flat, self._rope).view(part.shape) for part in (q, k))
        x = x + self._linear(attend(q, k, v).flatten(2), f"{at}.o_proj")
        at = f"{_LAYER}.mlp"
        y = self._norm(x)
        gated = _ACTIVATIONS[config.activation](self._linear(y, f"{at}.gate_proj")) * self._linear(y, f"{at}.up_proj")
        return x + self._linear(gated, f"{at}.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled.to(x.dtype) * self.weights[f"{_LAYER}.post_attention_layernorm.weight"]


def attend_where(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [R, w, H, D] over k and v [R, e, K, D] where visible [R, w, e], or [w, e] for all rows; [R, w, H, D]."""
    rows, width, heads, size = q.shape
    shared, groups = k.shape[2], heads // k.shape[2]
    # Query heads that share a KV head are queries of it
    q = q.view(rows, width, shared, groups, size).transpose(1, 2).reshape(rows, shared, width * groups, size)
    mask = visible.repeat_interleave(groups, -2)
    mask = mask if mask.dim() == 2 else mask[:, None]
    mixed = functional.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
    return mixed.view(rows, shared, width, groups, size).transpose(1, 2).reshape(rows, width, heads, size)
