"""GGUF blocks of every type that holds linears, written number by number from the format's definition where the gguf
package only reads them; it says what blocks mean.

Numbers are rounded to nearest, without the searches that make files of these types better."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

_WIDE = ("Q4_K", "Q5_K", "Q6_K")


def block_size(kind: str) -> tuple[int, int]:
    """(numbers, bytes) of a block."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return numbers, nbytes


def meant(blocks: Tensor, kind: str) -> Tensor:
    """uint8 [O, bytes] -> float32 [O, I], by the gguf package."""
    return torch.from_numpy(dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def quantized(weight: Tensor, kind: str) -> Tensor:
    """float32 [O, I], I a multiple of the type's block -> uint8 [O, bytes]"""
    if kind not in _WIDE:
        return torch.from_numpy(quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind]))
    blocks = torch.unflatten(weight.float(), 1, (-1, 256))
    made = _q6_k(blocks) if kind == "Q6_K" else _q4_k(blocks, 5 if kind == "Q5_K" else 4)
    return made.flatten(1)


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Blocks of random bits, but for scales that are small numbers: every code, sign and factor there is."""
    random = np.random.default_rng(seed)
    numbers, nbytes = block_size(kind)
    blocks = random.integers(0, 256, (rows, columns // numbers, nbytes), dtype=np.uint8)
    scales = (random.standard_normal((rows, columns // numbers, 2)) * 0.02).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[..., -2:] = scales[..., :2]
    else:
        count = 4 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        blocks[..., :count] = scales[..., :count]
    return torch.from_numpy(blocks).flatten(1)


def _whole(numbers: Tensor, step: Tensor, least: int, most: int) -> Tensor:
    """numbers / step, rounded and bounded; 0 where the step is 0."""
    return torch.where(step == 0, 0, numbers / torch.where(step == 0, 1, step)).round().clamp(least, most)


def _half(numbers: Tensor) -> Tensor:
    """float16 [..., 1] as bytes [..., 2]"""
    return numbers.half().view(torch.uint8)


def _q4_k(blocks: Tensor, bits: int) -> Tensor:
    """d, dmin: float16; 12 bytes of eight scales and eight minima of six bits; with five bits 32 bytes of the fifth
    ones; 128 bytes of the lowest four. A weight is d * scale * code - dmin * minimum."""
    parts, most = torch.unflatten(blocks, -1, (8, 32)), (1 << bits) - 1
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    steps = (high - low) / most
    d = (steps.amax(-1, keepdim=True) / 63).half()
    dmin = (-low.amin(-1, keepdim=True) / 63).half()
    scales, minima = _whole(steps, d.float(), 0, 63), _whole(-low, dmin.float(), 0, 63)
    shifted = parts + (dmin.float() * minima)[..., None]
    codes = _whole(shifted, (d.float() * scales)[..., None], 0, most).to(torch.uint8)
    scale, minimum = scales.to(torch.uint8), minima.to(torch.uint8)
    factors = torch.cat(
        (
            scale[..., :4] | scale[..., 4:] >> 4 << 6,
            minimum[..., :4] | minimum[..., 4:] >> 4 << 6,
            scale[..., 4:] & 15 | (minimum[..., 4:] & 15) << 4,
        ),
        -1,
    )
    pairs = torch.unflatten(codes & 15, -2, (4, 2))
    held = [_half(d), _half(dmin), factors, (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)]
    if bits == 5:
        fifth = torch.zeros_like(codes[..., 0, :])
        for part in range(8):
            fifth |= codes[..., part, :] >> 4 << part
        held.insert(3, fifth)
    return torch.cat(held, -1)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of the lowest four bits, 64 of the two above them, sixteen scales of eight bits with sign, d: float16.
    A weight is d * scale * (code - 32). The largest of each 16 numbers is given the code 0, so scales have either
    sign."""
    parts = torch.unflatten(blocks, -1, (16, 16))
    peaks = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))[..., 0] / -32
    d = (peaks.abs().amax(-1, keepdim=True) / 127).half()
    scales = _whole(peaks, d.float(), -128, 127)
    codes = _whole(parts, (d.float() * scales)[..., None], -32, 31) + 32
    # 128 numbers have 64 and 32 bytes: four runs of 32 numbers
    runs = torch.unflatten(codes.to(torch.uint8).flatten(-2), -1, (2, 4, 32))
    low, above = runs & 15, runs >> 4
    halves = torch.cat((low[..., 0, :] | low[..., 2, :] << 4, low[..., 1, :] | low[..., 3, :] << 4), -1)
    pairs = above[..., 0, :] | above[..., 1, :] << 2 | above[..., 2, :] << 4 | above[..., 3, :] << 6
    return torch.cat((halves.flatten(-2), pairs.flatten(-2), scales.to(torch.int8).view(torch.uint8), _half(d)), -1)
