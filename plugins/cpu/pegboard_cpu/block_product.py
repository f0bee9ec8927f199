"""Products with GGUF blocks: their layout in memory, and the kernel with what it writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pegboard.contracts.ops import Activation, Norm

from . import block_kernel, team
from .block_kinds import KINDS, LANES, Kind
from .block_records import make_records
from .functions import ACTIVATIONS

#: Bytes of weights that a thread should have to read before it is worth waking.
_ENOUGH: Final = 1 << 14
#: Kinds as the kernel knows them.
_NUMBERS: Final = {name: number for number, name in enumerate(KINDS)}


class Workplace:
    """The kernel, and what it writes to meanwhile: one for all linears of an engine, which run one after the other.
    Scratch is not theirs to count among their bytes: `__slots__` keeps it out of what they hold."""

    __slots__ = ("_prepared", "_scratch", "kernel", "prepared", "scratch")

    def __init__(self) -> None:
        self.kernel = team.Kernel(block_kernel.project_blocks, block_kernel.LAYOUT)
        self._prepared = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        #: Addresses of room for prepared rows, and for results of tiles.
        self.prepared = self.scratch = 0

    def make_room(self, nbytes: int, threads: int) -> None:
        """For `nbytes` of prepared rows, and for the results of `threads`."""
        if self._prepared.numel() < nbytes:
            self._prepared = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self.prepared = self._prepared.data_ptr()
        if self._scratch.numel() < threads * block_kernel.SCRATCH:
            self._scratch = torch.empty(threads * block_kernel.SCRATCH, dtype=torch.float32, device="cpu")
            self.scratch = self._scratch.data_ptr()


class BlocksProduct:
    """x W^T with what stands around it, over the records of one kind of blocks."""

    #: Features of a tile.
    lanes: Final = LANES

    def __init__(self, workplace: Workplace, kind: Kind, sources: Sequence[Tensor], bias: Tensor | None) -> None:
        records = make_records(kind, sources)
        self._workplace, self._records, self._bias = workplace, records, bias
        #: Output features, both halves' where they are gated.
        self.features: Final = sum(source.shape[0] for source in sources)
        self._size = sources[0].shape[1] // kind.file_bytes * kind.columns
        self._step = block_kernel.row_bytes(self._size)
        self._weight = records.data_ptr(), records.stride(0), _NUMBERS[kind.name]
        self._bias_place = 0 if bias is None else bias.data_ptr()
        self._zero, self._sums = kind.zero, kind.sums
        self.nbytes: Final = records.nbytes

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        *,
        biased: bool,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """residual + act(norm(x) W^T + b) for x [T, I] into `out`, of T, I above 0; float32, the numbers of a row of x,
        residual and out side by side."""
        rows, place = x.shape[0], self._workplace
        threads = torch.get_num_threads()
        if self.nbytes * rows < threads * _ENOUGH:
            threads = max(1, rows * self.nbytes // _ENOUGH)
        # Few rows are prepared by each thread for itself
        place.make_room(max(rows, 2 * threads * threads) * self._step, threads)
        place.kernel(
            threads,
            rows,
            self._size,
            out.shape[1],
            x.data_ptr(),
            4 * x.stride(0),
            *self._weight,
            self._bias_place if biased else 0,
            0 if activation is None else ACTIVATIONS[activation],
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else 4 * residual.stride(0),
            0 if norm is None else norm.weight.data_ptr(),
            place.prepared,
            self._step,
            place.scratch,
            out.data_ptr(),
            4 * out.stride(0),
            self._zero,
            self._sums,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
        )
