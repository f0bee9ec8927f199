"""Models: an architecture read from a config, and its forward pass over a ragged batch.

Letters: T tokens, N rows whose logits are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from .attention import AttentionLayer, LayerCache, StateLayer
from .batch import Batch
from .checkpoint import Checkpoint
from .device import DeviceFacts
from .ops import Ops
from .quantizer import LinearSpec, Quantizer, Shard

if TYPE_CHECKING:
    from torch import Tensor


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the engine must know about a model before it is loaded."""

    architecture: str
    #: Rows of the output head, padding included; ids at or beyond the tokenizer's size are never chosen.
    vocab_size: int
    hidden_size: int
    #: One a layer, in order; a shard's own head counts.
    layers: tuple[AttentionLayer | StateLayer, ...]
    #: Positions that the model was made for.
    context_length: int
    #: Every linear that will be made, and the bytes of all other tensors: the memory plan.
    linears: tuple[LinearSpec, ...]
    other_parameters: int
    #: Distinct gated activations and head sizes, for choosing ops.
    activations: tuple[str, ...]
    #: Upper bound of the floats a token needs while a layer runs, for the memory plan.
    activation_width: int


class ModelOutput(msgspec.Struct, frozen=True, kw_only=True):
    #: [T, E] after the last layer, before the final norm; or [N, E], only the rows of `StepContext.outputs`
    hidden: Tensor
    #: The hidden states after the layers that a speculator asked for, in its order, each [T, E].
    taps: tuple[Tensor, ...] = ()


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a forward pass works with."""

    batch: Batch
    ops: Ops
    #: One a layer.
    caches: tuple[LayerCache, ...]
    #: (layer, q [T, H, D], k, v, sinks) -> [T, H, D]: decode and prefill rows by their backends.
    attend: Callable[..., Tensor]
    #: [N] int64, N < T, ascending: the tokens whose hidden states are wanted; None: all. Once its K/V are written, the
    #: last layer need not be computed for the others.
    outputs: Tensor | None = None


class ModelNeed(msgspec.Struct, frozen=True, kw_only=True):
    """`config` in the Hugging Face dialect."""

    config: Mapping[str, Any]
    device: DeviceFacts
    shard_size: int = 1


class ModelKit(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is built from."""

    spec: ModelSpec
    config: Mapping[str, Any]
    checkpoint: Checkpoint
    quantizer: Quantizer
    shard: Shard
    #: torch device and dtype names
    device: str
    dtype: str
    max_length: int
    #: Layers whose outputs are kept (ModelOutput.taps).
    taps: tuple[int, ...] = ()
    #: Called with (bytes done, bytes in all) while loading.
    progress: Callable[[int, int], None] | None = None


class DecoderModel(ABC):
    """A causal language model. The descriptor's `matches` lists its architectures."""

    #: forward and logits may be recorded into a CUDA graph: nothing waits for the device, and what is launched depends
    #: on shapes alone.
    capturable: bool = True
    #: `embed`, `final` and `head` are there, for speculators that draft with their target's own.
    shares_ends: bool = False

    @classmethod
    @abstractmethod
    def refusals(cls, need: ModelNeed, options: Any) -> Sequence[str]:
        """What in this config is not supported, naming what is."""

    @classmethod
    @abstractmethod
    def describe(cls, need: ModelNeed) -> ModelSpec:
        """The facts, from the config alone."""

    @classmethod
    @abstractmethod
    def create(cls, kit: ModelKit) -> Self:
        """Build and load. CheckpointError names every missing or wrong-shaped tensor at once."""

    @abstractmethod
    def forward(self, context: StepContext) -> ModelOutput:
        """Run every layer over the batch; writes this step's K/V into the caches."""

    @abstractmethod
    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        """hidden [N, E] -> [N, V], final norm included."""

    def embed(self, ids: Tensor, ops: Ops) -> Tensor:
        """ids [N] int64 -> [N, E], what the first layer is given."""
        raise NotImplementedError(f"{type(self).__name__} does not share its embedding")

    def final(self, hidden: Tensor, ops: Ops) -> Tensor:
        """hidden [N, E] -> [N, E] after the final norm: what the head is given. May be `hidden` itself."""
        raise NotImplementedError(f"{type(self).__name__} does not share its final norm")

    def head(self, final: Tensor, ops: Ops) -> Tensor:
        """final [N, E] -> [N, V]; logits(hidden) is head(final(hidden)), up to rounding."""
        raise NotImplementedError(f"{type(self).__name__} does not share its head")

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Names of stored tensors that the model has no use for: a sign that the config does not fit the file."""
        return ()
