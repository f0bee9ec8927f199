"""How FlashDecoding cuts a layer's work into programs, from host facts alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton

from pegboard.contracts.attention import AttentionLayer, AttentionNeed
from pegboard.dtypes import element_bytes

from .flash_decoding_schedule import most_items

#: Splits of a row in batch-invariant mode, where their length may not follow the batch.
_FIXED_SPLITS = 32
#: Numbers of one tile of K; V's is as large. Half of it for float32.
_TILE = 8192


@dataclass(frozen=True)
class Shape:
    """Of one kind of layer and rows of some width."""

    block_m: int
    block_n: int
    block_d: int
    stages: int
    warps: int
    #: K and V tiles come through tensor descriptors.
    tma: bool
    #: BLOCK_M tiles of a row's (query, head) pairs, and pairs of each whose partial results are kept.
    query_blocks: int
    part_rows: int
    #: Items that the device works on at once.
    slots: int
    #: Tiles of a split in batch-invariant mode, else 0.
    fixed_tiles: int

    def fills_device(self, rows: int) -> bool:
        """Whether unsplit rows take nearly half of the programs that the device holds.

        Measured on an H200, 15 to 32 rows of up to 2048 entries: whole rows take 1.9 to 3.9 us less where they are
        short, and 1.0 (16 rows) or 3.3 us (24) more of 40 to 60 where all are that long."""
        return rows >= 0.45 * self.slots


class Shapes:
    """For one device with so many multiprocessors; `descriptors`: whether it has tensor descriptors."""

    def __init__(self, need: AttentionNeed, multiprocessors: int, descriptors: bool) -> None:
        self._need = need
        self._multiprocessors = multiprocessors
        self._descriptors = descriptors
        self._width = element_bytes(need.kv_dtype)

    def shape(self, layer: AttentionLayer, max_query: int, *, lone_tiles: bool = False) -> Shape:
        """`lone_tiles`: every program has one tile. Measured on an H200: two warps, which wait for each other less, are
        faster from two tiles on."""
        need, width = self._need, self._width
        block_d = triton.next_power_of_2(layer.head_size)
        block_n = max(32, min(128, _TILE // block_d // (2 if width == 4 else 1)))
        if self._descriptors and 64 <= need.page_size < block_n:
            block_n = need.page_size  # a tile of one page comes through one descriptor load
        tma = self._descriptors and block_d == layer.head_size and need.page_size % block_n == 0
        # Taller tiles and fewer warps would spill
        tallest = 64 if block_d <= 128 and self._descriptors else 32
        two_warps = width < 4 and (block_d <= 128 or tma) and not lone_tiles
        pairs = max_query * layer.query_heads // layer.kv_heads
        block_m = max(16, min(tallest, triton.next_power_of_2(pairs)))
        blocks = -(-pairs // block_m)
        residents = 4 if block_n * block_d * width <= 8192 else 2  # programs that a multiprocessor holds
        fixed = max(4, math.ceil(need.max_length / (block_n * _FIXED_SPLITS))) if need.batch_invariant else 0
        return Shape(
            block_m=block_m,
            block_n=block_n,
            block_d=block_d,
            stages=3,
            warps=2 if block_m == 16 and two_warps else 4,
            tma=tma,
            query_blocks=blocks,
            part_rows=block_m if blocks > 1 else pairs,
            slots=max(1, self._multiprocessors * residents // (layer.kv_heads * blocks)),
            fixed_tiles=fixed,
        )

    def most_pairs(self, layer: AttentionLayer) -> int:
        """Pairs whose partial results the largest batch keeps, over all KV heads, whatever the width of its rows."""
        need, most = self._need, 0
        for max_query in range(1, need.max_query + 1):
            shape = self.shape(layer, max_query)
            tiles = -(-need.max_length // shape.block_n)
            items = most_items(need.max_rows, shape.slots, tiles, shape.fixed_tiles)
            most = max(most, items * layer.kv_heads * shape.query_blocks * shape.part_rows)
        return most
