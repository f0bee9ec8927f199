"""What the linears of this plugin share: bias and reduction around a matmul; and the two of plain numbers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from pegboard.linears import DenseParts

from .probing import probe

logger = logging.getLogger("pegboard")

#: Rows up to which a product is split into blocks by hand, and the blocks.
_FEW_ROWS: Final = 2
_BLOCKS: Final = 16


class Shaped(Protocol):
    """A weight [O, I], dense or packed."""

    @property
    def shape(self) -> Sequence[int]: ...


class Parts(Protocol):
    """What `ShardLinear` needs to know of a linear: `DenseParts`, and their like around packed weights."""

    @property
    def weight(self) -> Shaped: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def all_reduce(self) -> Callable[[Tensor], Tensor] | None: ...
    @property
    def partition(self) -> Literal["output", "input"] | None: ...


class ShardLinear(ABC):
    """y = x W^T + b of this rank's part; `weight` is None unless it is dense."""

    weight: Tensor | None = None

    def __init__(self, parts: Parts) -> None:
        self.bias = parts.bias
        self.out_features, self.in_features = parts.weight.shape
        self.partition = parts.partition
        self._all_reduce = parts.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        if self._all_reduce is None:
            return self.multiply(x, self.bias)
        out = self._all_reduce(self.multiply(x, None))  # the bias once, not on every rank
        return out if self.bias is None else out + self.bias

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, I] -> x W^T + bias, [T, O]"""

    @property
    @abstractmethod
    def matrix_bytes(self) -> int: ...

    @property
    def weight_bytes(self) -> int:
        return self.matrix_bytes + (0 if self.bias is None else self.bias.nbytes)


class DenseLinear(ShardLinear):
    """The weight may be a view of a mapped file: never written."""

    def __init__(self, parts: DenseParts) -> None:
        super().__init__(parts)
        self.weight = self._weight = parts.weight
        cpu_float32 = parts.weight.device.type == "cpu" and parts.weight.dtype == torch.float32
        self._splits = cpu_float32 and parts.weight.is_contiguous() and self.out_features >= _BLOCKS

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._splits and 0 < x.shape[0] <= _FEW_ROWS:
            return _multiply_few(x, self._weight, bias)
        return linear(x, self._weight, bias)

    @property
    def matrix_bytes(self) -> int:
        return self._weight.nbytes


class PackedLinear(DenseLinear):
    """float32 on the CPU, in oneDNN's blocked order beside the plain one: 1.7 times as fast at eight rows, level from
    some hundred on. The plain weight serves up to two rows, and the embedding that is tied to it."""

    def __init__(self, parts: DenseParts) -> None:
        super().__init__(parts)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(parts.weight)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] <= _FEW_ROWS:
            return super().multiply(x, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return out

    @property
    def matrix_bytes(self) -> int:
        return 2 * super().matrix_bytes


def _multiply_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As a batch of products, one for each of `_BLOCKS` runs of output features: torch spreads a batch over its
    threads, but not a matrix times a vector, and reading the weights is all there is to do."""
    (rows, width), features = x.shape, weight.shape[0]
    # A single row may be stored as a column, which torch calls contiguous, too, and multiplies five times as slowly
    x = x.contiguous().flatten().view(rows, width)
    even = features - features % _BLOCKS
    out = x.new_empty(features, rows)
    blocks = weight[:even].view(_BLOCKS, even // _BLOCKS, width)
    torch.bmm(blocks, x.T.expand(_BLOCKS, -1, -1), out=out[:even].view(_BLOCKS, -1, rows))
    if even < features:
        torch.mm(weight[even:], x.T, out=out[even:])
    out = out.view(1, features) if rows == 1 else out.T.contiguous()
    return out if bias is None else out.add_(bias)


@probe
def can_pack() -> bool:
    """Whether this torch packs, tried once: the operators are not of its public interface."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.arange(48.0).view(6, 8)
    bias = torch.arange(6.0)
    x = torch.ones(_FEW_ROWS + 1, 8)
    try:
        packed = PackedLinear(DenseParts(weight=weight, bias=bias, all_reduce=None, partition=None))
        works = torch.equal(packed(x), linear(x, weight, bias))  # whole numbers: exact in any order
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("float32 linears stay unpacked: torch %s has other operators (%s)", torch.__version__, error)
        return False
    if not works:
        logger.warning("float32 linears stay unpacked: packed ones of torch %s are wrong here", torch.__version__)
    return works
