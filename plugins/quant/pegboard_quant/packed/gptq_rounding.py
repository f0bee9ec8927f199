"""GPTQ: columns are rounded one after the other, and what a rounding lost is made up for by those that are left.

Frantar et al., "GPTQ: Accurate post-training quantization for generative pre-trained transformers", 2022. Columns go
by how much their inputs weigh; the grid is that of the weight as it was, so groups stay runs of columns."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .rounding import Grid

#: Of the mean of the moment's diagonal, added to it.
DAMPING: Final = 0.01
_BLOCK: Final = 128


def gptq_codes(weight: Tensor, grid: Grid, moment: Tensor) -> Tensor:
    """Codes uint8 [O, I] of a weight [O, I] float32, given the mean of x^T x of its inputs [I, I]."""
    columns = weight.shape[1]
    diagonal = moment.diagonal()
    order = diagonal.argsort(descending=True)
    left = weight[:, order].clone()
    damped = moment[order][:, order].double()
    damped.diagonal().add_(max(DAMPING * float(diagonal.double().mean()), 1e-12))
    # Row i of this factor, from its diagonal on, says how the columns after i make up for an error in i
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    groups = order // grid.group
    scales = grid.scales.float()[:, groups]
    zeros = grid.zeros.float()[:, groups] if grid.zeros is not None else torch.full_like(scales, 1 << (grid.bits - 1))
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = torch.empty(weight.shape[0], stop - start)
        for column in range(start, stop):
            code = (left[:, column] / scales[:, column]).round_().add_(zeros[:, column])
            code.clamp_(0, (1 << grid.bits) - 1)
            codes[:, order[column]] = code.to(torch.uint8)
            error = left[:, column] - (code - zeros[:, column]) * scales[:, column]
            error /= factor[column, column]
            left[:, column + 1 : stop].addr_(error, factor[column, column + 1 : stop], alpha=-1)
            errors[:, column - start] = error
        left[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return codes
