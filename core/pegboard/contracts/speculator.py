"""Speculators: propose tokens for the target model to verify. Verification belongs to the sampler.

Letters: R rows, k drafts, E hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from .attention import AttentionLayer, StateLayer, TextAttention
from .device import DeviceFacts
from .model import ModelSpec
from .sampler import SlotOpening

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .batch import Batch


class SpeculatorNeed(msgspec.Struct, frozen=True, kw_only=True):
    device: DeviceFacts
    target: ModelSpec
    #: Slots are 0 .. slots-1; the last one may be that of idle rows, as for samplers.
    slots: int
    max_length: int
    #: Whether the sampler's verification wants draft distributions.
    wants_probs: bool = False


class SpeculatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the engine must know of a speculator before it is made."""

    #: Drafts a row at most; decode rows have up to 1 + drafts queries.
    drafts: int
    #: Its drafts are trees (`Drafts.parents`), of which so many drafts follow one another at most. None: chains.
    depth: int | None = None
    #: Target layers whose hidden states it reads.
    taps: tuple[int, ...] = ()
    #: The target's final hidden states that it is told (`Speculator.observe_hidden`): none; those of the tokens that
    #: kept ones were chosen from; or those of prompts as well (`Speculator.observe_prompt`).
    hidden: Literal["none", "kept", "all"] = "none"
    #: Its own attention or state layers; they get cache groups of their own.
    layers: tuple[AttentionLayer | StateLayer, ...] = ()
    #: Bytes of its weights, and of a cache that it keeps itself, on the target's device: for the memory plan.
    weight_bytes: int = 0


class DraftTarget(ABC):
    """The ends of the model that is drafted for: what goes into its first layer, and what is made of the last one's
    result. Inputs are on the target's device and in its dtype, and are not changed."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of hidden states."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """[N] int64 -> [N, E]"""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """[N, E] after the final norm -> logits [N, V]"""


class DraftContext(msgspec.Struct, frozen=True, kw_only=True):
    """State after the target's last step, all on the device."""

    #: [R] int64
    slots: Tensor
    #: [R] int64: the last token chosen, and its position
    last_ids: Tensor
    positions: Tensor
    #: The target's taps at the last kept token, each [R, E].
    taps: tuple[Tensor, ...]
    #: The batch of the speculator's own layers, when it has some.
    batch: Batch | None
    #: Drafts a row that are wanted: `SpeculatorSpec.drafts`, or fewer, near the end of an answer or where fewer pay.
    drafts: int


class Drafts(msgspec.Struct, frozen=True, kw_only=True):
    #: [R, k] int64; k may be less than the drafts that are wanted, and what is beyond them is left out. -1, or what is
    #: no token of the vocabulary: no draft here.
    ids: Tensor
    #: [R, k] int64: index of each draft's parent among (last token, draft 0, draft 1, ...), which stands before it;
    #: drafts of one parent differ. None: a chain. With a `SpeculatorSpec.depth`, and only then.
    parents: Tensor | None = None
    #: [R, k, V] float32 distributions that the drafts were drawn from; None for a tree.
    probs: Tensor | None = None


class Speculator(ABC):
    #: propose and observe may be recorded into a CUDA graph.
    capturable: bool = False
    #: Proposals need the host's view of the tokens (a host suffix automaton, say): rows run at depth 0.
    needs_host_token: bool = False

    @classmethod
    @abstractmethod
    def refusals(cls, need: SpeculatorNeed, options: Any) -> Sequence[str]:
        """A draft of another vocabulary or a shorter context is refused here."""

    @classmethod
    @abstractmethod
    def describe(cls, need: SpeculatorNeed, options: Any) -> SpeculatorSpec:
        """What it will be, from its options and its own model's headers; loads nothing."""

    @classmethod
    @abstractmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self: ...

    @classmethod
    def trainer(cls, training: HeadTraining) -> HeadTrainer:
        """What trains the heads that such a speculator loads. PegboardError: it can't for this target."""
        raise NotImplementedError(f"{cls.__name__} has nothing to train")

    @abstractmethod
    def open(self, openings: Sequence[SlotOpening]) -> None: ...

    @abstractmethod
    def propose(self, context: DraftContext) -> Drafts:
        """Changes nothing that drafts depend on. Rows that it has not caught up with yet may have none."""

    @abstractmethod
    def observe(self, slots: Tensor, ids: Tensor, count: Tensor) -> None:
        """The target kept ids [R, 1 + k] (-1 beyond count [R]) for these slots [R]."""

    def attach(self, target: DraftTarget) -> None:
        """Once, before any slot is opened, of a speculator that asks for hidden states (`SpeculatorSpec.hidden`)."""
        raise NotImplementedError(f"{type(self).__name__} asks for hidden states, and has no use for their model")

    def observe_hidden(self, slots: Tensor, ids: Tensor, count: Tensor, hidden: Tensor) -> None:
        """After `observe` of the same, of a speculator that asks for hidden states. hidden [R, 1 + k, E]: hidden[r, i]
        is the target's state after its final norm from which ids[r, i] was chosen, that of the token before it;
        anything beyond `count`. Valid during the call."""
        raise NotImplementedError(f"{type(self).__name__} asks for hidden states, and does not observe them")

    def observe_prompt(self, slot: int, start: int, hidden: Tensor) -> None:
        """Only with `SpeculatorSpec.hidden` "all", and before the slot's `observe` of the same step. hidden [N, E]: the
        states of the slot's tokens start, start + 1, ..., all of which have a successor in its opening. Pieces come in
        order; what a prefix in the cache spares the target is never told. Valid during the call."""
        raise NotImplementedError(f"{type(self).__name__} asks for the hidden states of prompts, and ignores them")


class HeadText(msgspec.Struct, frozen=True, kw_only=True):
    """A text with what the target made of it, on the device that trains."""

    #: [N] int64
    ids: Tensor
    #: [N - 1, E] float32: the final hidden state after each token but the last.
    hidden: Tensor
    #: [N - 1] int64: the target's first choice after each of them.
    greedy: Tensor


class HeadTraining(msgspec.Struct, frozen=True, kw_only=True):
    """What heads are trained for."""

    target: ModelSpec
    #: The target's config.json.
    config: Mapping[str, Any]
    #: [V, E] float32 each, on the device that trains.
    embedding: Tensor
    head: Tensor
    #: Gives the attention of heads that have some.
    attention: Callable[[AttentionLayer], TextAttention]
    #: Drafts a row that they are to give.
    drafts: int
    seed: int


class HeadTrainer(ABC):
    """Heads while they are trained: `pegboard train-heads` minimises `loss` over `parameters`, and writes `weights` and
    `config` into a folder that the speculator loads, before the first step as well, as what training began with."""

    @property
    @abstractmethod
    def parameters(self) -> Sequence[Tensor]:
        """Leaves in float32 that ask for gradients."""

    @abstractmethod
    def loss(self, texts: Sequence[HeadText]) -> Tensor:
        """A number, the mean over the texts' places. Texts of at least drafts + 2 tokens."""

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Of model.safetensors, by name."""

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """Of config.json."""
