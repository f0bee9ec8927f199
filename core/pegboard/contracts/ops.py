"""Ops: everything between the matmuls and the attention. One part serves all of them; a plugin subclasses
`pegboard.ops.TorchOps` and replaces what it is faster at.

Letters: T tokens, E hidden size, H query heads, K KV heads, D head size, F intermediate size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from .attention import KVLayout, LayerCache
from .device import DeviceFacts
from .quantizer import Linear

if TYPE_CHECKING:
    from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "gelu"]


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """RMS norm: x / sqrt(mean(x^2) + eps) * (weight + offset), computed in float32 (float64 for float64).

    `round_first`: the normalised x is rounded to x's dtype before the weight multiplies it (Llama, Qwen); otherwise
    after (Gemma)."""

    weight: Tensor
    eps: float
    offset: float = 0.0
    round_first: bool = True


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of one kind of rotary embedding: cos and sin [max_length, D_rot / 2], float32 (or float64).

    neox style: dimension i pairs with i + D_rot / 2; interleaved: 2i with 2i + 1. D_rot <= D; the rest passes."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


class SlotTables(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner keeps by slot, of one cache group. `lengths` [slots] int64: entries written so far, had none been
    dropped; `last_ids` [slots] int64: the token that comes next; `pages` [slots, P] int32; `dropped` [slots] int64:
    entries that the cache manager dropped from the front."""

    lengths: Tensor
    last_ids: Tensor
    pages: Tensor
    dropped: Tensor
    page_size: int


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """Of R rows of one token each: the token and its position [R] int64; where the row then ends, and the flat entry
    where its K/V go [R] int64; its entries in the cache [R] int32; its first pages [R, P] int32."""

    ids: Tensor
    positions: Tensor
    ends: Tensor
    write_index: Tensor
    kv_len: Tensor
    page_table: Tensor


class OpsNeed(msgspec.Struct, frozen=True, kw_only=True):
    device: DeviceFacts
    dtype: str
    hidden_size: int
    #: Head sizes that occur.
    head_sizes: tuple[int, ...]
    activations: tuple[str, ...]
    #: A row's result must not depend on how many rows there are, bit for bit.
    batch_invariant: bool = False


class Ops(ABC):
    """Invariants: inputs are not changed, except the caches by the writing ops and the residual of `project`; results
    have x's dtype."""

    #: Every op may be recorded into a CUDA graph.
    capturable: bool = False

    @classmethod
    @abstractmethod
    def refusals(cls, need: OpsNeed, options: Any) -> Sequence[str]: ...

    @classmethod
    @abstractmethod
    def create(cls, need: OpsNeed, options: Any) -> Self: ...

    @abstractmethod
    def writes(self, layout: KVLayout) -> bool:
        """Whether `rope_write` can fill this layout (quantizing on the way, if it has scales)."""

    @abstractmethod
    def locate(self, slots: Tensor, advance: Tensor, tables: SlotTables, width: int) -> Located:
        """Where rows go on that the device alone knows: slots [R] int64, and advance [R] int64, 1, or 0 for a row that
        is idle. `width`: pages of each that are wanted. With s = slots[r], position p = lengths[s], entry
        e = p - dropped[s] and page size S: id last_ids[s]; end p + advance[r]; write_index
        pages[s, e // S] * S + e % S; kv_len end - dropped[s]; page_table pages[s, :width]."""

    @abstractmethod
    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """ids [T], weight [V, E] -> [T, E]"""

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """[..., E] -> norm(x), plus `residual` if given (norms after a block)."""

    @abstractmethod
    def project(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + act(linear(norm(x))), each part optional: the unit that kernels fuse.

        x [T, I]. With `activation` the linear gives [gate | up] of 2F and the result is act(gate) * up, [T, F].
        `residual` shares no memory with x and is given away: the result may be written into it."""

    @abstractmethod
    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """x [T, 2F] = [gate | up] -> act(gate) * up, [T, F]"""

    @abstractmethod
    def rope_write(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        positions: Tensor,
        rope: Rope | None,
        cache: LayerCache,
        write_index: Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """qkv [T, (H + 2K) * D] and heads (H, K, D) -> q [T, H, D] and k, v [T, K, D] (None when not kept).

        Norms q and k by head, turns them by `positions` [T], and writes k and v into the cache at the flat entries
        `write_index` [T] (quantized if the layout says so)."""

    @abstractmethod
    def copy_pages(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        """Copy pages source [N] to target [N] (int64) in every tensor of the layer; the sets are disjoint."""

    @abstractmethod
    def move_entries(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        """Move flat entries source [N] to target [N] (int64); the sets may overlap: all are read before any is
        written. Compaction after tree verification and eviction."""
