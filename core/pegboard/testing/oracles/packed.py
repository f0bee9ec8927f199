"""Group-quantized weights in the layouts of their formats, written from the formats' definitions, number by number.

Every writer takes codes [O, I] and zero points [O, G], both whole numbers of 0 to 2^bits - 1, and scales [O, G], and
gives the tensors by the suffix of their names. `meant` is the weight that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

#: The outputs that AutoAWQ's GEMM layout puts into a word of 32 bits, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def meant(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """[O, I] float64: scale * (code - zero point), with those of the group that each column belongs to."""
    return scales.double()[:, group_of] * (codes.double() - zeros.double()[:, group_of])


def runs(columns: int, group: int) -> Tensor:
    """The group of each column where they are in order; group -1: one of all."""
    return torch.arange(columns) // (columns if group == -1 else group)


def words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [X, Y] -> int32 [X, ceil(Y bits / 32)], the first of each word in its lowest bits, padded with 0."""
    count = 32 // bits
    made = torch.zeros(numbers.shape[0], -(-numbers.shape[1] // count), dtype=torch.int64)
    for column in range(numbers.shape[1]):
        made[:, column // count] |= (numbers[:, column].long() & ((1 << bits) - 1)) << (bits * (column % count))
    return torch.where(made >= 2**31, made - 2**32, made).int()


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """O a multiple of 8."""

    def interleaved(numbers: Tensor) -> Tensor:  # [O, X] -> [X, O], words in the order of the layout
        shuffled = [8 * (place // 8) + AWQ_ORDER[place % 8] for place in range(numbers.shape[0])]
        return words(numbers[shuffled].T, 4)

    return {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales.T.contiguous()}


def gptq(
    codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, version: int, group_of: Tensor | None = None
) -> dict[str, Tensor]:
    """Version 1 stores zero points less one, within their bits."""
    stored = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zeros.long() - (1 if version == 1 else 0)).T, bits),
        "scales": scales.T.contiguous(),
    }
    if group_of is not None:
        stored["g_idx"] = group_of.int()
    return stored


def compressed(
    codes: Tensor,
    zeros: Tensor | None,
    scales: Tensor,
    bits: int,
    group_of: Tensor | None = None,
    packs_zeros: bool = True,
) -> dict[str, Tensor]:
    """compressed-tensors' pack-quantized: signed numbers, packed plus 2^(bits-1); zeros None: symmetric."""
    middle = 1 << (bits - 1)
    signed = codes.long() - middle
    stored = {
        "weight_packed": words(signed + middle, bits),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }
    if zeros is not None:
        signed = zeros.long() - middle
        stored["weight_zero_point"] = words((signed + middle).T, bits).T.contiguous() if packs_zeros else signed.char()
    if group_of is not None:
        stored["weight_g_idx"] = group_of.int()
    return stored
