"""The blocks that decoder-only models are made of: attention and gated MLP around a residual stream."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from pegboard.contracts.model import ModelOutput, StepContext
from pegboard.contracts.ops import Activation, Norm, Ops, Rope
from pegboard.contracts.quantizer import Linear

from .experts import Experts


class GatedMLP(msgspec.Struct, frozen=True, kw_only=True):
    """residual + down(act(gate(x)) * up(x)), x the normed residual."""

    activation: Activation
    gate_up: Linear
    down: Linear

    def forward(self, hidden: Tensor, norm: Norm, post_norm: Norm | None, ops: Ops) -> Tensor:
        """hidden [T, E] -> [T, E]"""
        gated = ops.project(hidden, self.gate_up, norm=norm, activation=self.activation)
        return _add(ops, hidden, gated, self.down, post_norm)


class DecoderLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Pre-norm attention and pre-norm MLP: each projection is one op, so that kernels may fuse around it."""

    index: int
    #: (H, K, D) of this rank
    heads: tuple[int, int, int]
    rope: Rope
    input_norm: Norm
    qkv: Linear
    #: Over each head, before the rotation.
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    o: Linear
    #: Over what a block gives, before the residual is added.
    post_attention_norm: Norm | None = None
    mlp_norm: Norm
    mlp: GatedMLP | Experts
    post_mlp_norm: Norm | None = None

    def forward(self, hidden: Tensor, context: StepContext, outputs: Tensor | None = None) -> Tensor:
        """hidden [T, E] -> [T, E], or [N, E] for `outputs` [N]"""
        ops, batch, cache = context.ops, context.batch, context.caches[self.index]
        qkv = ops.project(hidden, self.qkv, norm=self.input_norm)
        write_index = batch.write_index[cache.group]
        q, k, v = ops.rope_write(
            qkv, self.heads, batch.positions, self.rope, cache, write_index, self.q_norm, self.k_norm
        )
        mixed = context.attend(self.index, q, k, v).flatten(1)
        if outputs is not None:
            hidden, mixed = hidden[outputs], mixed[outputs]
            if not outputs.shape[0]:
                return hidden
        hidden = _add(ops, hidden, mixed, self.o, self.post_attention_norm)
        return self.mlp.forward(hidden, self.mlp_norm, self.post_mlp_norm, ops)


def _add(ops: Ops, hidden: Tensor, x: Tensor, linear: Linear, norm: Norm | None) -> Tensor:
    if norm is None:
        return ops.project(x, linear, residual=hidden)
    return ops.norm(ops.project(x, linear), norm, residual=hidden)


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding, layers, final norm and head."""

    embedding: Tensor
    #: Multiplies the embedding, already rounded to its dtype.
    embedding_scale: float | None = None
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear
    #: logits = softcap * tanh(logits / softcap)
    logit_softcap: float | None = None
    taps: tuple[int, ...] = ()
    #: Puts a vocabulary that is split over ranks together.
    gather: Callable[[Tensor], Tensor] | None = None

    def embed(self, ids: Tensor, ops: Ops) -> Tensor:
        hidden = ops.embed(ids, self.embedding)
        return hidden if self.embedding_scale is None else hidden * self.embedding_scale

    def forward(self, context: StepContext) -> ModelOutput:
        hidden = self.embed(context.batch.ids, context.ops)
        kept: dict[int, Tensor] = {}
        last = self.layers[-1]
        for layer in self.layers:
            narrow = layer is last and last.index not in self.taps
            hidden = layer.forward(hidden, context, context.outputs if narrow else None)
            if layer.index in self.taps:
                kept[layer.index] = hidden if layer is last else hidden.clone()  # the next layer adds to it
        return ModelOutput(hidden=hidden, taps=tuple(kept[i] for i in self.taps))

    def logits(self, hidden: Tensor, ops: Ops, norm: Norm | None) -> Tensor:
        """`norm`: the final one, None: it has been done."""
        logits = ops.project(hidden, self.head, norm=norm)
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return self.gather(logits) if self.gather is not None else logits
