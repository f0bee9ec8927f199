"""What the kernels read is the file's blocks, number by number: records, read as their layout says, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")
pytest.importorskip("gguf")

from pegboard.testing.oracles.gguf_blocks import block_size, meant, quantized, random_blocks
from pegboard_cpu.block_kinds import KINDS, LANES, Kind
from pegboard_cpu.block_records import make_records, records_bytes


class Reader:
    """The bytes of one record of a tile, one after the other."""

    def __init__(self, record: np.ndarray) -> None:
        self._record, self._at = record, 0

    def take(self, count: int, dtype: type = np.uint8) -> np.ndarray:
        """`count` numbers of each lane: [LANES, count], float16 and whole ones lane by lane."""
        nbytes = count * LANES * np.dtype(dtype).itemsize
        part = self._record[self._at : self._at + nbytes].view(dtype)
        self._at += nbytes
        return part.reshape(count, LANES).T

    def numbers(self, bits: int) -> np.ndarray:
        """[LANES, 32] whole numbers without sign."""
        if bits == 8:
            return self._fours(8).reshape(LANES, 32)
        above = np.zeros((LANES, 8, 4), dtype=np.uint8)
        if bits == 5:
            [held] = self._fours(1).swapaxes(0, 1)
            above = np.stack([held >> quad & 1 for quad in range(8)], axis=1)
        elif bits == 6:
            held = self._fours(2)
            above = np.stack([held[:, quad // 4] >> 2 * (quad % 4) & 3 for quad in range(8)], axis=1)
        halves = self._fours(4).reshape(LANES, 16)
        low = np.concatenate((halves & 15, halves >> 4), axis=1)
        return low + 16 * above.reshape(LANES, 32)

    def _fours(self, count: int) -> np.ndarray:
        """[LANES, count, 4]: four bytes of each lane, side by side."""
        part = self._record[self._at : self._at + 4 * count * LANES]
        self._at += 4 * count * LANES
        return part.reshape(count, LANES, 4).swapaxes(0, 1)


def read(kind: Kind, record: np.ndarray) -> np.ndarray:
    """[LANES, columns] float32: scale * (number - zero) + minimum, as the format's own code rounds it."""
    reader, found = Reader(record), []
    head = [reader.take(1, np.float16).astype(np.float32) for _ in range(2 if kind.minimum else 1)]
    for _ in range(kind.blocks):
        steps = list(head)
        if kind.name in ("Q4_K", "Q5_K"):
            steps = [part * reader.take(1).astype(np.float32) for part in head]
        elif kind.name == "Q6_K":
            factors = np.concatenate([reader.take(1, np.int8) for _ in range(2)], axis=1)
            steps = [(head[0] * factors.astype(np.float32)).repeat(16, axis=1)]
        numbers = reader.numbers(kind.bits).astype(np.float32)
        if kind.signed:
            numbers = np.where(numbers > 127, numbers - 256, numbers)
        values = steps[0] * (numbers - np.float32(kind.zero))
        found.append(values + steps[1] if kind.minimum else values)
    assert reader._at == len(record)
    return np.concatenate(found, axis=1)


def dequantised(kind: Kind, records: Tensor, rows: int) -> Tensor:
    each = records.numpy().reshape(records.shape[0], -1, LANES * kind.record_bytes)
    tiles = [np.concatenate([read(kind, record) for record in tile], axis=1) for tile in each]
    return torch.from_numpy(np.concatenate(tiles)[:rows])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("made", ["random", "rounded"])
def test_records_hold_the_blocks_without_loss(name: str, made: str) -> None:
    """Of two sources; more than the tiles that are taken apart at a time, and a last one that is not full."""
    kind, rows = KINDS[name], (7, 32 * LANES + 5)
    columns = 2 * block_size(name)[0]
    if made == "random":
        sources = [random_blocks(name, count, columns, seed=count) for count in rows]
    else:
        generator = torch.Generator().manual_seed(1)
        sources = [quantized(torch.randn(count, columns, generator=generator), name) for count in rows]
    records = make_records(kind, sources)
    assert records.nbytes == records_bytes(kind, sum(rows), columns)
    found = dequantised(kind, records, sum(rows))
    assert torch.equal(found, torch.cat([meant(source, name) for source in sources]))


def test_kinds_have_the_formats_sizes() -> None:
    for name, kind in KINDS.items():
        assert (kind.columns, kind.file_bytes) == block_size(name)
        assert kind.record_bytes - kind.file_bytes == (4 if name in ("Q4_K", "Q5_K") else 0)
