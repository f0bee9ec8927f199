"""The layer of EAGLE-1 (Li et al. 2024): files of it, and what it computes.

Letters: R rows, w entries of each, E hidden size, H query heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
_QKV, _GATE_UP = f"{_LAYER}.self_attn.qkv_proj", f"{_LAYER}.mlp.gate_up_proj"
#: Matrices that take the same input, by the name of both.
_JOINED: Mapping[str, tuple[str, ...]] = {
    _QKV: tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    _GATE_UP: (f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj"),
}
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "gelu": functional.gelu}

#: qkv [R, w, H + 2 K, D], not turned yet (`EagleLayer.turned`) -> [R, w, H, D]: what is kept of keys and values is the
#: caller's matter.
Attend = Callable[[Tensor], Tensor]


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
    """Weights by their names in the file; those of matrices that take the same input may stand joined, as `_JOINED`
    names them. `embedding` [V, E] or None, where the target's is used."""

    def __init__(self, config: LlamaConfig, raw: Mapping[str, Any], weights: Mapping[str, Tensor], length: int) -> None:
        """`length`: positions of the longest text."""
        self.config, self._weights = config, weights
        matrix = weights["fc.weight"]
        self.rope = make_rope(
            raw, config.layout(raw).rotary_size, length, device=str(matrix.device), dtype=matrix.dtype
        )

    @classmethod
    def load(cls, files: HeadFiles, shape: EagleShape, dtype: torch.dtype, device: torch.device, length: int) -> Self:
        weights = {name: files.read(name, dtype, device).clone() for name in shape.tensors}
        for joined, parts in _JOINED.items():
            weight, bias = _join(weights, parts)
            weights = {name: tensor for name, tensor in weights.items() if name.rpartition(".")[0] not in parts}
            weights |= {f"{joined}.weight": weight} | ({} if bias is None else {f"{joined}.bias": bias})
        return cls(shape.config, shape.raw, weights, length)

    @property
    def embedding(self) -> Tensor | None:
        return self._weights.get(_EMBEDDING)

    def forward(self, embedded: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """embedded and hidden [R, w, E]: a token, and the state that it was chosen from -> [R, w, E]: what the target's
        state after that token is expected to be."""
        rows, width, size = hidden.shape
        config = self.config
        x = self._linear(torch.cat((embedded, hidden), -1).flatten(0, 1), "fc")
        mixed = attend(self._linear(x, _QKV).view(rows, width, -1, config.head_size))
        x = self._added(x, mixed.view(rows * width, -1), f"{_LAYER}.self_attn.o_proj")
        norm = self._weights[f"{_LAYER}.post_attention_layernorm.weight"]
        y = functional.rms_norm(x, (size,), norm, config.rms_norm_eps)
        gate, up = self._linear(y, _GATE_UP).chunk(2, -1)
        return self._added(x, _ACTIVATIONS[config.activation](gate) * up, f"{_LAYER}.mlp.down_proj").view(hidden.shape)

    def turned(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, w, H, D], k and v [R, w, K, D] of qkv, queries and keys turned by positions [R, w]."""
        shared = self.config.kv_heads
        heads, flat = qkv.shape[2] - shared, positions.flatten()
        both = rotate(qkv[:, :, :heads].flatten(0, 1), flat, self.rope).view(*qkv.shape[:2], heads, -1)
        return both[:, :, : heads - shared], both[:, :, heads - shared :], qkv[:, :, heads:]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights.get(f"{name}.weight"), self._weights.get(f"{name}.bias")
        if weight is None:  # while it is trained
            weight, bias = _join(self._weights, _JOINED[name])
        return functional.linear(x, weight, bias)

    def _added(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        """x and what the matrix makes of y."""
        return torch.addmm(x, y, self._weights[f"{name}.weight"].T)


def _join(weights: Mapping[str, Tensor], parts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of matrices that take the same input; a part without a bias adds nothing."""
    matrices = [weights[f"{part}.weight"] for part in parts]
    biases = [weights.get(f"{part}.bias") for part in parts]
    if all(bias is None for bias in biases):
        return torch.cat(matrices), None
    pairs = zip(biases, matrices, strict=True)
    return torch.cat(matrices), torch.cat([m.new_zeros(len(m)) if bias is None else bias for bias, m in pairs])


def attend_where(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [R, w, H, D] over k and v [R, e, K, D] where visible [R, w, e]; [R, w, H, D]."""
    rows, width, heads, size = q.shape
    shared, groups = k.shape[2], heads // k.shape[2]
    # Query heads that share a KV head are queries of it
    q = q.view(rows, width, shared, groups, size).transpose(1, 2).reshape(rows, shared, width * groups, size)
    mask = visible.repeat_interleave(groups, -2)[:, None]
    mixed = functional.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
    return mixed.view(rows, shared, width, groups, size).transpose(1, 2).reshape(rows, width, heads, size)
