"""The blocks that decoder-only models are made of: attention and gated MLP around a residual stream."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from torch import Tensor

from pegboard.contracts.model import ModelOutput, StepContext
from pegboard.contracts.ops import Activation, Norm, Ops, Rope
from pegboard.contracts.quantizer import Linear


class DecoderLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Pre-norm attention and pre-norm gated MLP: each projection is one op, so that kernels may fuse around it."""

    index: int
    #: (H, K, D) of this rank
    heads: tuple[int, int, int]
    rope: Rope
    activation: Activation
    input_norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [T, E] -> [T, E]"""
        ops, batch, cache = context.ops, context.batch, context.caches[self.index]
        qkv = ops.project(hidden, self.qkv, norm=self.input_norm)
        q, k, v = ops.rope_write(qkv, self.heads, batch.positions, self.rope, cache, batch.write_index[cache.group])
        mixed = context.attend(self.index, q, k, v)
        hidden = ops.project(mixed.flatten(1), self.o, residual=hidden)
        gated = ops.project(hidden, self.gate_up, norm=self.mlp_norm, activation=self.activation)
        return ops.project(gated, self.down, residual=hidden)


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding, layers, final norm and head."""

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear
    taps: tuple[int, ...] = ()
    #: Puts a vocabulary that is split over ranks together.
    gather: Callable[[Tensor], Tensor] | None = None

    def forward(self, context: StepContext) -> ModelOutput:
        hidden = context.ops.embed(context.batch.ids, self.embedding)
        kept: dict[int, Tensor] = {}
        for layer in self.layers:
            hidden = layer.forward(hidden, context)
            if layer.index in self.taps:
                kept[layer.index] = hidden
        return ModelOutput(hidden=hidden, taps=tuple(kept[i] for i in self.taps))

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        logits = ops.project(hidden, self.head, norm=self.norm)
        return self.gather(logits) if self.gather is not None else logits
