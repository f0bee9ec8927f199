"""From GGUF's blocks to the records that tiles read: what is in a file's block, number by number, and side by side.

A tile's records hold its features' bytes next to each other, in units: of two bytes for the float16 numbers, of one for
whole factors, of four for numbers. So each lane's four inputs follow each other. Of a byte of four-bit numbers, the
low half is of inputs 0 .. 15 of 32, the high one of 16 .. 31. A fifth bit of input 4 q + i is bit q of byte i of four;
fifth and sixth bit are bits 2 (q % 4) and above of byte i of four, for q below 4, and of four others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from .block_kinds import BLOCK, LANES, Kind

#: Tiles whose blocks are taken apart at a time: bounds what that needs.
_AT_ONCE: Final = 32


def records_bytes(kind: Kind, rows: int, columns: int) -> int:
    """Bytes of [rows, columns] as records: features are filled up to whole tiles."""
    return -(-rows // LANES) * LANES * (columns // kind.columns) * kind.record_bytes


def make_records(kind: Kind, sources: Sequence[Tensor]) -> Tensor:
    """Blocks as stored, uint8 [rows, bytes a row] of each source, as records [tiles, bytes] (see `block_tiles`)."""
    rows, width = sum(source.shape[0] for source in sources), sources[0].shape[1]
    tiles, count = -(-rows // LANES), width // kind.file_bytes
    records = torch.empty(tiles, count * LANES * kind.record_bytes, dtype=torch.uint8, device="cpu")
    stored = torch.cat([*sources]) if len(sources) > 1 else sources[0]
    for first in range(0, tiles, _AT_ONCE):
        target = records[first : first + _AT_ONCE]
        blocks = stored[first * LANES : (first + target.shape[0]) * LANES]
        whole = torch.zeros(target.shape[0] * LANES, count, kind.record_bytes, dtype=torch.uint8, device="cpu")
        whole[: blocks.shape[0]] = _READERS.get(kind.name, _as_stored)(kind, blocks.reshape(-1, count, kind.file_bytes))
        if kind.bits == 8 and not kind.signed:
            whole[..., kind.head_bytes :].bitwise_xor_(0x80)
        by_tile = whole.view(-1, LANES, count, kind.record_bytes)
        parts = target.view(-1, count, LANES * kind.record_bytes)
        for start, stop, unit in _units(kind):
            # [tile, lane, block, number of it, byte] -> [tile, block, number, lane, byte]
            values = torch.unflatten(by_tile[..., start:stop], -1, (-1, unit)).permute(0, 2, 3, 1, 4)
            parts[..., start * LANES : stop * LANES].view(values.shape).copy_(values)
    return records


def _units(kind: Kind) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes that stay together) of the parts of a feature's record."""
    yield 0, kind.head_bytes, 2
    for block in range(kind.blocks):
        start = kind.head_bytes + block * kind.block_bytes
        numbers = start + kind.factor_bytes
        if kind.factors:
            yield start, numbers, 1
        yield numbers, start + kind.block_bytes, 4


def _as_stored(kind: Kind, blocks: Tensor) -> Tensor:
    return blocks


def _read_q5(kind: Kind, blocks: Tensor) -> Tensor:
    """Q5_0, Q5_1: scale, minimum, the fifth bits of inputs 0 .. 31, bytes of two halves."""
    heads, rest = blocks[..., : kind.head_bytes], blocks[..., kind.head_bytes :]
    above = (rest[..., :4, None] >> _counting(8)) & 1
    halves = rest[..., 4:]
    numbers = torch.cat((halves & 15, halves >> 4), -1) | above.flatten(-2) << 4
    return _record(kind, heads, None, numbers.unsqueeze(-2))


def _read_q4_k(kind: Kind, blocks: Tensor) -> Tensor:
    """Q4_K, Q5_K: scale, that of what is subtracted, factors of six bits; in Q5_K the fifth bits, bit b of byte
    i of input i of block b; bytes of two halves, 32 for each two blocks of 32."""
    heads, factors = blocks[..., :4].clone(), torch.unflatten(blocks[..., 4:16], -1, (3, 4))
    heads[..., 3] ^= 0x80  # records add minima
    low, middle, high = factors[..., 0, :], factors[..., 1, :], factors[..., 2, :]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), -1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), -1)
    halves = torch.unflatten(blocks[..., -128:], -1, (4, 32))
    numbers = torch.stack((halves & 15, halves >> 4), -2).flatten(-3, -2)
    if kind.bits == 5:
        numbers = numbers | ((blocks[..., 16:48].unsqueeze(-2) >> _counting(8)[:, None]) & 1) << 4
    return _record(kind, heads, torch.stack((scales, minima), -1), numbers)


def _read_q6_k(kind: Kind, blocks: Tensor) -> Tensor:
    """Q6_K: for each 128 inputs 64 bytes of two halves; then 32 of four pairs of bits, of inputs 32 apart; factors with
    sign of each 16; scale."""
    halves = torch.unflatten(blocks[..., :128], -1, (2, 64))
    pairs = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
    low = torch.unflatten(torch.stack((halves & 15, halves >> 4), -2).flatten(-3), -1, (8, 32))
    high = ((pairs >> (2 * _counting(4))[:, None]) & 3).flatten(-3, -2)
    factors = torch.unflatten(blocks[..., 192:208], -1, (8, 2))
    return _record(kind, blocks[..., 208:], factors, low | high << 4)


#: By name; others are stored as records are.
_READERS: Final[dict[str, Callable[[Kind, Tensor], Tensor]]] = {
    "Q5_0": _read_q5,
    "Q5_1": _read_q5,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q4_k,
    "Q6_K": _read_q6_k,
}


def _record(kind: Kind, heads: Tensor, factors: Tensor | None, numbers: Tensor) -> Tensor:
    """heads [..., bytes], factors [..., blocks, bytes], numbers [..., blocks, 32] -> [..., `record_bytes`]"""
    parts = [] if factors is None else [factors]
    above = numbers >> 4
    if kind.bits == 5:
        parts.append(_gathered(torch.unflatten(above, -1, (BLOCK // 4, 4)), 1))
    elif kind.bits == 6:
        parts.append(_gathered(torch.unflatten(above, -1, (2, 4, 4)), 2).flatten(-2))
    low = numbers & 15
    parts.append(low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << 4)
    return torch.cat((heads, torch.cat(parts, -1).flatten(-2)), -1)


def _gathered(quads: Tensor, bits: int) -> Tensor:
    """[..., quad, 4] -> [..., 4], the bits of each quad above those of the one before."""
    found, *others = quads.unbind(-2)
    for quad, other in enumerate(others, 1):
        found = found | other << (bits * quad)
    return found


def _counting(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device="cpu")
