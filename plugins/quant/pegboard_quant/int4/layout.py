"""The layout in memory of 4-bit weights that the kernels read: tiles in the order of a tensor core's registers.

A tile has 128 rows of W and 128 columns: 2048 words of 32 bits, contiguous. Let w0 to w10 be the bits of a word's place
in its tile and n0 to n2 those of a code's place in its word. The code is of

    row    w4 w5 w6 w0 w7 w8 w10        (lowest bit first)
    column n2 w2 w3 n0 n1 w1 w9

so that a warp's loads of 16 bytes, side by side, leave in each lane just the elements that it owns of `mma`'s left
operand: what is unpacked goes from registers into the product."""

from __future__ import annotations

from typing import Final

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..packed.codes import pack, unpack
from ..packed.weight import PackedWeight

#: Rows and columns of a tile.
TILE: Final = 128
#: Rows of W that one program takes at least: there is a counter for so many.
LEAST_ROWS: Final = 64
_ROW_BITS: Final = (4, 5, 6, 0, 7, 8, 10)
#: Bits of a column, as bits of the place of a word, or (from 11 on) of a code in it.
_COLUMN_BITS: Final = (13, 2, 3, 11, 12, 1, 9)
#: Rows that are packed at a time: bounds the workspace at load.
_BLOCK: Final = 64 * TILE


class TiledWeight(msgspec.Struct, frozen=True, kw_only=True):
    """W [O, I] = scale * (code - zero point), or scale * code + offset where it is `shifted`, for
    `Int4Launcher.multiply`. Rows and columns are padded to whole tiles with codes, scales and zero points of 0."""

    shape: tuple[int, int]
    #: Columns a group: 32, 64, or a multiple of 128.
    group: int
    #: dtype of the scales: float16 or bfloat16.
    scale_dtype: torch.dtype
    #: int32 [row tiles, column tiles, 2048].
    words: Tensor
    #: int32 [groups, row tiles * 128]: the bits of the scale, and above them the zero point, or the offset's bits.
    steps: Tensor
    #: int32 [row tiles * 2], zeros between launches: which parts of a sum are there.
    counters: Tensor
    #: int32 [I]: column j multiplies input feature `order[j]`; None: j.
    order: Tensor | None = None
    #: Groups are then of 32 or 64 columns.
    shifted: bool = False

    @property
    def nbytes(self) -> int:
        held = (self.words, self.steps, self.counters, self.order)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def groups_of(columns: int, group: int) -> tuple[int, int]:
    """(columns a group as the kernels see it, groups): one group of all columns is of whole tiles."""
    if group >= columns:
        return -(-columns // TILE) * TILE, 1
    padded = -(-columns // TILE) * TILE
    return group, -(-padded // group)


def counters_of(rows: int) -> int:
    """Counters of a weight with so many rows: the most sums that programs may share."""
    return -(-rows // TILE) * TILE // LEAST_ROWS


def tiled_bytes(rows: int, columns: int, group: int, *, ordered: bool) -> int:
    """`nbytes` of such a weight."""
    row_tiles, column_tiles = -(-rows // TILE), -(-columns // TILE)
    words = row_tiles * column_tiles * TILE * TILE // 8
    steps = groups_of(columns, group)[1] * row_tiles * TILE
    return 4 * (words + steps + counters_of(rows) + (columns if ordered else 0))


def tile(weight: PackedWeight) -> TiledWeight:
    """From the record that readers make, on its device."""
    rows, columns = weight.shape
    group, groups = groups_of(columns, weight.group)
    above = -rows % TILE
    parts = [_tile_codes(unpack(weight.codes[start : start + _BLOCK], 4, columns)) for start in range(0, rows, _BLOCK)]
    if weight.offsets is not None:
        above_scales = _bits(weight.offsets)
    elif weight.zeros is not None:
        above_scales = weight.zeros.int()
    else:
        above_scales = torch.full_like(weight.scales, 8, dtype=torch.int32)
    steps = _bits(weight.scales) | (above_scales << 16)
    return TiledWeight(
        shape=(rows, columns),
        group=group,
        scale_dtype=weight.scales.dtype,
        words=torch.cat(parts),
        steps=pad(steps, (0, groups - steps.shape[1], 0, above)).T.contiguous(),
        counters=torch.zeros(counters_of(rows), dtype=torch.int32, device=weight.codes.device),
        order=weight.order,
        shifted=weight.offsets is not None,
    )


def _bits(values: Tensor) -> Tensor:
    """Of 16-bit floats, as int32."""
    return values.contiguous().view(torch.int16).int() & 0xFFFF


def untile(weight: TiledWeight) -> PackedWeight:
    """The reverse of `tile`, except that zero points are always written out."""
    rows, columns = weight.shape
    nibbles = unpack(weight.words.view(torch.uint8).flatten(0, 1), 4, TILE * TILE)
    codes = torch.empty_like(nibbles)
    codes[:, _places(nibbles.device)] = nibbles
    tiles = codes.view(*weight.words.shape[:2], TILE, TILE).transpose(1, 2)
    whole = tiles.reshape(tiles.shape[0] * TILE, -1)[:rows, :columns]
    held = -(-columns // weight.group)
    steps = weight.steps.T[:rows, :held]
    return PackedWeight(
        bits=4,
        in_features=columns,
        group=min(weight.group, columns),
        codes=pack(whole, 4),
        scales=(steps & 0xFFFF).to(torch.int16).view(weight.scale_dtype),
        zeros=None if weight.shifted else (steps >> 16).to(torch.uint8),
        offsets=(steps >> 16).to(torch.int16).view(weight.scale_dtype) if weight.shifted else None,
        order=weight.order,
    )


def _tile_codes(codes: Tensor) -> Tensor:
    """uint8 [O, I] -> int32 [row tiles, column tiles, 2048]"""
    whole = pad(codes, (0, -codes.shape[1] % TILE, 0, -codes.shape[0] % TILE))
    tiles = whole.view(whole.shape[0] // TILE, TILE, -1, TILE).transpose(1, 2).flatten(2)
    nibbles = tiles[:, :, _places(codes.device)]
    return (nibbles[:, :, ::2] | (nibbles[:, :, 1::2] << 4)).contiguous().view(torch.int32)


def _places(device: torch.device) -> Tensor:
    """For each code in the order of storage, its place in the tile, row by row."""
    stored = torch.arange(TILE * TILE, device=device)
    # A code's place in its word is the lowest three bits of its place in storage
    word, nibble = stored >> 3, stored & 7
    bits = [(word >> bit) & 1 for bit in range(11)] + [(nibble >> bit) & 1 for bit in range(3)]
    row = sum(bits[bit] << i for i, bit in enumerate(_ROW_BITS))
    column = sum(bits[bit] << i for i, bit in enumerate(_COLUMN_BITS))
    return torch.as_tensor(row * TILE + column, device=device)
