"""The writer of GGUF blocks against the gguf package's reader: numbers come back within half a step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gguf")

from pegboard.testing.oracles.gguf_blocks import block_size, meant, quantized, random_blocks

#: Steps of the widest range that 32 (in Q6_K 16) numbers have, and what rounded scales and minima may add.
BOUNDS = {"Q4_K": 1.2 / 15, "Q5_K": 1.4 / 31, "Q6_K": 1.1 / 32}


@pytest.mark.parametrize("kind", BOUNDS)
def test_numbers_come_back(kind: str) -> None:
    weight = torch.randn(5, 1024, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 2, 5)[:, None]
    weight[:, 700:800] = 0
    weight[:, 256:288].abs_()
    weight[:, 288:320].abs_().neg_()
    blocks = quantized(weight, kind)
    numbers, nbytes = block_size(kind)
    assert blocks.shape == (5, 1024 // numbers * nbytes)
    wide = weight.unflatten(1, (-1, 256)).abs().amax(-1, keepdim=True).expand(-1, -1, 256).flatten(1)
    error = (meant(blocks, kind) - weight).abs()
    assert (error <= BOUNDS[kind] * wide).all()
    # Rounding to nearest leaves about step / sqrt(12) of an even spread
    assert error.norm() / weight.norm() < {"Q4_K": 0.11, "Q5_K": 0.055, "Q6_K": 0.03}[kind]


def test_zeros_stay() -> None:
    for kind in BOUNDS:
        assert not meant(quantized(torch.zeros(2, 256), kind), kind).any()


def test_random_blocks_are_finite_and_use_every_code() -> None:
    for kind in ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        weight = meant(random_blocks(kind, 8, 512, seed=3), kind)
        assert weight.isfinite().all()
        assert (weight > 0).any()
        assert (weight < 0).any()
