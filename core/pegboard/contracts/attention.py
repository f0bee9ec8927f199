"""Attention backends: the layout of the KV cache and the mixing of one layer.

Letters: T tokens, R rows, H query heads, K KV heads (H % K == 0), D head size, S page size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar

import msgspec

from .device import DeviceFacts, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from .batch import Rows

PlanT = TypeVar("PlanT")


class AttentionLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one attention layer, per rank (a shard has its own H and K)."""

    query_heads: int
    kv_heads: int
    head_size: int
    #: Multiplies q . k
    scale: float
    #: A query sees at most this many entries, its own included; None: all.
    window: int | None = None
    #: scores = softcap * tanh(scores / softcap), before the mask.
    softcap: float | None = None
    #: The layer has one learned logit a head that takes part in the softmax's sum.
    sinks: bool = False


class StateLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A recurrent layer (state space, linear attention): one page holds the whole state of a sequence."""

    tensors: tuple[TensorSpec, ...]


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one page of one layer holds. Two parts understand each other iff their layouts are equal.

    `tensors` gives shapes a page, e.g. for "nhd": k and v, both (S, K, D). A quantized cache adds its scales, e.g.
    k_scale (S, K); a backend that adds up score mass adds score_mass (S, K) in float32. The runner allocates
    [pages, *shape] for each, filled with zeros."""

    name: str
    tensors: tuple[TensorSpec, ...]


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of one layer, by the names of its layout, each [pages, *shape]."""

    layout: KVLayout
    group: int
    page_size: int
    tensors: Mapping[str, Tensor]


class AttentionNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend is asked to serve."""

    device: DeviceFacts
    #: dtype of q and of the output
    dtype: str
    #: dtype of the cached K/V: a float dtype, "int8", "float8_e4m3fn"
    kv_dtype: str
    page_size: int
    #: Distinct layers of the model.
    layers: tuple[AttentionLayer, ...]
    phase: Literal["prefill", "decode"]
    #: Longest query of a row in this phase; decode: 1 + drafts.
    max_query: int
    max_rows: int
    max_length: int
    #: Whether tree verification (ancestor masks) is used.
    ancestors: bool = False
    #: Whether the cache manager asks for score mass.
    score_mass: bool = False
    #: Results must not depend on a row's neighbours, bit for bit.
    batch_invariant: bool = False


class TextAttention(Protocol):
    """Causal attention of whole texts, differentiable in q, k and v."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
        """q [T, H, D], k and v [T, K, D] of one dtype -> [T, H, D] in it: N texts one behind another, which begin at
        starts [N + 1] int32, on their device, and have at most `longest` tokens each."""


class AttentionBackend(ABC, Generic[PlanT]):
    """Mixes one layer's tokens with what they may see. Prefill and decode rows may have different backends.

    The cache already holds this step's K/V when `forward` runs (written by the op `rope_write`).

    A quantized entry is scale times payload, exactly or as the compute dtype rounds it.

    Invariants: q, k, v, the batch and the cache are not changed (except a score_mass tensor of its own layout);
    masked and idle rows give zeros; a row's result does not depend on entries outside what it may see, NaN
    included; nothing synchronises the device.
    """

    #: plan and forward may be recorded into a CUDA graph: fixed launches from bounds, no host reads, no allocation
    #: that outlives the call but from the graph's pool.
    capturable: bool = False

    @classmethod
    @abstractmethod
    def refusals(cls, need: AttentionNeed, options: Any) -> Sequence[str]:
        """Why this backend can't serve `need`; empty: it can."""

    @classmethod
    @abstractmethod
    def create(cls, need: AttentionNeed, options: Any) -> Self: ...

    @classmethod
    @abstractmethod
    def layouts(cls, need: AttentionNeed, layer: AttentionLayer, options: Any) -> Sequence[KVLayout]:
        """The layouts that it reads for this layer, best first. Assembly takes the first that the prefill backend,
        the decode backend and the ops agree on."""

    @classmethod
    def differentiable(cls, device: DeviceFacts, layer: AttentionLayer) -> TextAttention | None:
        """Such a layer's attention as training needs it, in float32 or what it rounds that to; None: it has none."""
        return None

    def workspace(self) -> Sequence[TensorSpec]:
        """Tensors that the backend needs for life; the runner allocates them once and passes them to `plan`."""
        return ()

    @abstractmethod
    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> PlanT:
        """Once a step for each distinct layer of a cache group, shared by all layers equal to it. Uses device
        tensors and host bounds only. The result is opaque to the core."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        plan: PlanT,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] -> [T, H, D] contiguous, for the rows of the plan.

        k, v [T, K, D] are this step's own (after rope), or None when the write op did not keep them; the cache holds
        them either way. `sinks` [H] float32 for layers that have them."""
