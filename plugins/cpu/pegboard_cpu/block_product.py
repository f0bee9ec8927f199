"""Products with GGUF blocks: their layout in memory, and the kernel with what it writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pegboard.contracts.ops import Activation, Norm

from . import block_kernel, team
from .block_tiles import BLOCK, LANES, Kind
from .functions import ACTIVATIONS

#: Bytes of weights that a thread should have to read before it is worth waking.
_ENOUGH: Final = 1 << 14


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
    """x W^T with what stands around it, over one weight's records."""

    #: Features of a tile.
    lanes: Final = LANES

    def __init__(self, workplace: Workplace, kind: Kind, sources: Sequence[Tensor], bias: Tensor | None) -> None:
        records = make_records(kind, sources)
        self._workplace, self._records, self._bias = workplace, records, bias
        self._features = sum(source.shape[0] for source in sources)
        self._size = sources[0].shape[1] // kind.block_bytes * BLOCK
        self._step = block_kernel.row_bytes(self._size)
        self._weight = records.data_ptr(), records.stride(0), block_kernel.KIND_NUMBERS[kind.name]
        self._bias_place = 0 if bias is None else bias.data_ptr()
        self._zero = kind.zero
        self.nbytes: Final = records.nbytes

    def __call__(
        self,
        x: Tensor,
        *,
        biased: bool,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + act(norm(x) W^T + b) for x [T, I]; float32, rows of x and of the residual lie side by side."""
        rows, place = x.shape[0], self._workplace
        features = self._features if activation is None else self._features // 2
        out = x.new_empty(rows, features)
        if not rows:
            return out
        threads = torch.get_num_threads()
        if self.nbytes * rows < threads * _ENOUGH:
            threads = max(1, rows * self.nbytes // _ENOUGH)
        # Few rows are prepared by each thread for itself
        place.make_room(max(rows, 2 * threads * threads) * self._step, threads)
        place.kernel(
            threads,
            rows,
            self._size,
            features,
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
            self._zero,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
        )
        return out


def records_bytes(kind: Kind, rows: int, columns: int) -> int:
    """Bytes of [rows, columns] as records: features are filled up to whole tiles."""
    return -(-rows // LANES) * LANES * (columns // BLOCK) * kind.block_bytes


def make_records(kind: Kind, sources: Sequence[Tensor]) -> Tensor:
    """Blocks as stored, uint8 [rows, bytes a row] of each source, as records [tiles, bytes] (see `block_tiles`)."""
    rows, width = sum(source.shape[0] for source in sources), sources[0].shape[1]
    tiles, blocks = -(-rows // LANES), width // kind.block_bytes
    stored = torch.zeros(tiles * LANES, width, dtype=torch.uint8, device="cpu")
    torch.cat([*sources], out=stored[:rows])
    by_tile = stored.view(tiles, LANES, blocks, kind.block_bytes)
    heads = kind.block_bytes - BLOCK * kind.bits // 8
    records = torch.empty(tiles, blocks * LANES * kind.block_bytes, dtype=torch.uint8, device="cpu")
    parts = records.view(tiles, blocks, LANES * kind.block_bytes)
    # [tile, lane, block, number of it, byte] -> [tile, block, number, lane, byte]
    for start, stop, unit in ((0, heads, 2), (heads, kind.block_bytes, 4)):
        count = (stop - start) // unit
        values = by_tile[..., start:stop].view(tiles, LANES, blocks, count, unit).permute(0, 2, 3, 1, 4)
        target = parts[..., start * LANES : stop * LANES].view(tiles, blocks, count, LANES, unit)
        target.copy_(values)
    if kind.bits == 8 and not kind.signed:
        parts[..., heads * LANES :].bitwise_xor_(0x80)
    return records
