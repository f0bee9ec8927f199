"""Quantizers: recognise how a checkpoint's linear weights are stored, and make the linears that run them.

Letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import msgspec

from .checkpoint import Checkpoint, TensorInfo
from .device import DeviceFacts

if TYPE_CHECKING:
    from torch import Tensor


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """This process's part of a tensor-parallel model. The collectives are identities when size is 1."""

    rank: int = 0
    size: int = 1
    #: Sum over ranks, in place or not; returns the sum.
    all_reduce: Callable[[Tensor], Tensor] | None = None
    #: Concatenate over ranks along the last dimension.
    all_gather: Callable[[Tensor], Tensor] | None = None


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One linear of the model: y = x W^T + b. Several stored matrices may be fused along the output."""

    #: Name in the model, e.g. "model.layers.0.self_attn.qkv_proj".
    name: str
    #: Stored base names in order, e.g. (".../q_proj", ".../k_proj", ".../v_proj"); ".weight" and ".bias" follow.
    sources: tuple[str, ...]
    in_features: int
    #: Output features of each source, before sharding.
    out_features: tuple[int, ...]
    bias: bool = False
    #: How tensor parallelism splits it: along each source's output, along the input (summed over ranks by the
    #: linear itself), or not.
    partition: Literal["output", "input"] | None = None
    #: Output features are split in units of this many (head size), so that heads stay whole.
    unit: int = 1
    #: The stored matrix is the embedding table, too. A dense linear lends the model its `weight`; beside a packed one
    #: the model keeps a table in the activations' dtype: `bytes_for` counts it, the linear's `weight_bytes` do not.
    tied: bool = False


class Linear(Protocol):
    """A ready linear. Reads its weights, changes nothing."""

    in_features: int
    out_features: int
    #: Dense weight [O, I] for ops that fuse around it, or None when it is packed.
    weight: Tensor | None
    bias: Tensor | None
    #: "input": the result of a rank is partial until reduced; calling the linear reduces it.
    partition: Literal["output", "input"] | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] in x's dtype. The result is the caller's, who may write to it (`Ops.project` adds the
        residual in place): neither x nor memory that the linear keeps or gives out again."""
        ...

    @property
    def weight_bytes(self) -> int: ...


class AddingLinear(Linear, Protocol):
    """A packed linear whose kernels add a residual as they store their result: `Ops` call it where there is one."""

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual [T, O] + y of x [T, I], in x's dtype. `residual` shares no memory with x and is given away: the
        result may be written into it."""
        ...


class QuantizerNeed(msgspec.Struct, frozen=True, kw_only=True):
    device: DeviceFacts
    #: dtype of activations
    dtype: str
    #: The checkpoint's `quantization_config`, or {}; `quant_method` names the scheme.
    scheme: Mapping[str, Any] = {}
    #: Storage types that occur among the tensors ("bfloat16", "Q4_1", ...).
    storages: frozenset[str] = frozenset()
    #: Rows that a decode step has at most, for choosing kernels.
    max_rows: int = 1
    #: A row's result must not depend on how many rows there are, bit for bit.
    batch_invariant: bool = False
    #: What the config asks for: "latency", "throughput", "determinism" or "memory".
    objective: str = "throughput"


class Quantizer(ABC):
    """Makes linears. Its descriptor's `matches` lists the schemes that it recognises ("none", "awq", "gguf", ...)."""

    @classmethod
    @abstractmethod
    def refusals(cls, need: QuantizerNeed, options: Any) -> Sequence[str]:
        """Why it can't: an unknown scheme, a device without the kernels (naming the alternative)."""

    @classmethod
    @abstractmethod
    def create(cls, need: QuantizerNeed, options: Any) -> Self: ...

    def notes(self) -> Sequence[str]:
        """For the report: which path it takes here, and whether that gains speed or only memory."""
        return ()

    @abstractmethod
    def tensor_names(self, spec: LinearSpec, names: Mapping[str, Any]) -> tuple[str, ...]:
        """The stored tensors that `linear` will read, there or not, given the names of all that are: for the report of
        missing and unused tensors."""

    @abstractmethod
    def bytes_for(self, spec: LinearSpec, stored: Mapping[str, TensorInfo], shard: Shard) -> int:
        """Bytes that the linear will hold, known before loading (the memory plan), and those of the table that the
        model keeps beside a packed linear whose spec is `tied`. `stored`: the checkpoint's tensors by name; what it
        lacks is refused by `linear`, not here."""

    @abstractmethod
    def linear(self, spec: LinearSpec, checkpoint: Checkpoint, shard: Shard) -> Linear:
        """Read, shard, pack once and return the linear. Modules that the scheme skips are made dense.
        CheckpointError for a missing or wrong-shaped tensor, naming it and both shapes."""


class LinearStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen at the input of a linear while it read calibration text."""

    #: Mean of x^T x, float32 [I, I].
    moment: Tensor
    #: Mean of |x|, float32 [I].
    magnitude: Tensor


class WeightWriter(ABC):
    """Writes the linears of one scheme into a checkpoint. A quantizer part that can has a class method
    `writer(method, options) -> WeightWriter`, and ConfigError for a method that it doesn't know."""

    #: Whether `tensors` wants statistics.
    needs_statistics: bool = False
    #: Whether inputs shall be scaled by `scales` before weights are rounded; what was before the linear takes the
    #: reverse.
    folds: bool = False

    @abstractmethod
    def config(self, skipped: Sequence[str]) -> Mapping[str, Any]:
        """The `quantization_config` of the checkpoint; modules named `skipped` are dense."""

    @abstractmethod
    def tensors(self, weight: Tensor, statistics: LinearStatistics | None) -> Mapping[str, Tensor]:
        """A weight [O, I] float32 as the scheme stores it: tensors by the suffix of their names."""

    def scales(self, weight: Tensor, statistics: LinearStatistics) -> Tensor:
        """[I]: what the columns of a weight [O, I] are to be multiplied with; only asked where it `folds`."""
        raise NotImplementedError(f"{type(self).__name__} folds no scales")


class TunedProduct(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a part's kernels compute in several ways, one of which is the fastest on a device."""

    #: For people, and unlike those of other products: "4096 x 14336, groups of 128, 16 rows".
    name: str
    #: Way -> calls that all do the same on other memory, so much of it that no cache holds it when the first comes
    #: again. The first way is the one taken so far. A call only launches: it waits for nothing.
    ways: Mapping[str, Sequence[Callable[[], object]]]
    #: Whether what the last call gave is right; waits for it.
    is_right: Callable[[], bool]


class KernelTuner(ABC):
    """Knows in which ways a part's kernels may run, for `pegboard tune`, which measures them. A quantizer part that can
    has a class method `tuner(need, options) -> KernelTuner`, and ConfigError where its kernels don't run."""

    @abstractmethod
    def products(
        self,
        linears: Sequence[LinearSpec],
        stored: Mapping[str, TensorInfo],
        shard: Shard,
        rows: Sequence[int] | None,
    ) -> Iterator[TunedProduct]:
        """Those of these linears with so many rows, each once; None: with the rows that are worth a look. One is held
        at a time: they have memory on the device. ConfigError: no kernel has a choice with so many rows."""

    @abstractmethod
    def table(self, chosen: Mapping[str, tuple[str, float]]) -> Mapping[str, Any]:
        """What an option of the part reads, as plain data, of the way chosen for each product and its microseconds."""
