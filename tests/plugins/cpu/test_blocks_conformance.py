"""Quantizer `blocks-cpu` against the suite that every quantizer is held to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.contracts.quantizer import LinearSpec
from pegboard.testing import QuantizerSuite
from pegboard.testing.oracles.checkpoints import MemoryCheckpoint

pytest.importorskip("numba")
pytest.importorskip("gguf")

from pegboard.testing.oracles.gguf_blocks import meant, quantized
from pegboard_cpu.blocks_quantizer import BlocksCpuQuantizer


class BlocksSuite(QuantizerSuite):
    """The weights are those that the blocks mean, exactly: what is off is the rounding of activations."""

    part: Any = BlocksCpuQuantizer
    claims = ("batch_invariant",)
    error = 1e-2

    def checkpoint(self, spec: LinearSpec) -> tuple[MemoryCheckpoint, Tensor, Tensor | None]:
        kind = self.storages[0]
        dense, _, bias = super().checkpoint(spec)
        names = [f"{source}.weight" for source in spec.sources]
        blocks = {name: quantized(dense.stored[name], kind) for name in names}
        for name, stored in blocks.items():
            dense.stored[name] = meant(stored, kind)
        checkpoint = MemoryCheckpoint(dense.stored, storages=dict.fromkeys(names, kind), blocks=blocks)
        return checkpoint, torch.cat([dense.stored[name] for name in names]).double(), bias

    def store(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"weight": weight.float()}, weight


class TestQ4Zero(BlocksSuite):
    storages = ("Q4_0",)


class TestQ4One(BlocksSuite):
    storages = ("Q4_1",)


class TestQ8Zero(BlocksSuite):
    storages = ("Q8_0",)


class TestQ5Zero(BlocksSuite):
    storages = ("Q5_0",)


class TestQ5One(BlocksSuite):
    storages = ("Q5_1",)


class WideSuite(BlocksSuite):
    """Blocks of 256: whole ones for either of two ranks."""

    in_features = 512


class TestQ4K(WideSuite):
    storages = ("Q4_K",)


class TestQ5K(WideSuite):
    storages = ("Q5_K",)


class TestQ6K(WideSuite):
    storages = ("Q6_K",)
