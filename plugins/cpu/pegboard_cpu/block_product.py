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
    Not theirs to count: no attribute of a linear's own leads to it."""

    __slots__ = ("_kernel", "_prepared", "_scratch")

    def __init__(self) -> None:
        self._kernel = team.Kernel(block_kernel.project_blocks, block_kernel.LAYOUT)
        self._prepared = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def run(
        self,
        x: Tensor,
        records: Tensor,
        kind: Kind,
        features: int,
        bias: Tensor | None,
        norm: Norm | None,
        activation: Activation | None,
        residual: Tensor | None,
    ) -> Tensor:
        """records [tiles, bytes]; the rest as for `BlocksProduct`"""
        rows, size = x.shape
        out = x.new_empty(rows, features)
        if not rows:
            return out
        threads = max(1, min(torch.get_num_threads(), rows * records.nbytes // _ENOUGH))
        step = block_kernel.row_bytes(size)
        # Few rows are prepared by each thread for itself
        if self._prepared.numel() < max(rows, 2 * threads * threads) * step:
            self._prepared = torch.empty(max(rows, 2 * threads * threads) * step, dtype=torch.uint8, device="cpu")
        if self._scratch.numel() < threads * block_kernel.scratch_numbers():
            self._scratch = torch.empty(threads * block_kernel.scratch_numbers(), dtype=torch.float32, device="cpu")
        self._kernel(
            threads,
            rows,
            size,
            features,
            x.data_ptr(),
            4 * x.stride(0),
            records.data_ptr(),
            records.stride(0),
            block_kernel.KIND_NUMBERS[kind.name],
            0 if bias is None else bias.data_ptr(),
            0 if activation is None else ACTIVATIONS[activation],
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else 4 * residual.stride(0),
            0 if norm is None else norm.weight.data_ptr(),
            self._prepared.data_ptr(),
            step,
            self._scratch.data_ptr(),
            out.data_ptr(),
            kind.zero,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
        )
        return out


class BlocksProduct:
    """x W^T with what stands around it, over one weight's records."""

    #: Features of a tile.
    lanes: Final = LANES

    def __init__(self, workplace: Workplace, kind: Kind, sources: Sequence[Tensor]) -> None:
        self._workplace, self._kind = workplace, kind
        self.records = make_records(kind, sources)

    def __call__(
        self,
        x: Tensor,
        features: int,
        bias: Tensor | None,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """As `Ops.project`, with `features` of the result; rows of x and of the residual lie side by side."""
        return self._workplace.run(x, self.records, self._kind, features, bias, norm, activation, residual)


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
