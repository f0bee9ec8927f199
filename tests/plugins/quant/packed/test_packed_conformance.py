"""The packed quantizers against the suite that every quantizer is held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pegboard.testing import QuantizerSuite
from pegboard.testing.oracles import packed as written


class Packed(QuantizerSuite):
    """Rounds to the nearest code of the group's range, whatever the format; only its writer differs."""

    standard = True
    dtypes = ("float32", "bfloat16")
    storages = ("int32", "float16")
    bits: ClassVar[int] = 4
    group: ClassVar[int] = 32
    symmetric: ClassVar[bool] = False

    def write(self, codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def groups(self, columns: int) -> Tensor:
        return written.runs(columns, self.group)

    def store(self, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        group_of = self.groups(weight.shape[1])
        count, largest = int(group_of.max()) + 1, (1 << self.bits) - 1
        members = [weight[:, group_of == group] for group in range(count)]
        low = torch.stack([part.amin(1).clamp(max=0) for part in members], 1)
        high = torch.stack([part.amax(1).clamp(min=0) for part in members], 1)
        if self.symmetric:
            scales = (torch.maximum(high, -low) / (largest // 2)).half()
            zeros = torch.full_like(low, 1 << (self.bits - 1)).long()
        else:
            scales = ((high - low) / largest).half()
            zeros = (-low / scales.double()).round().clamp(0, largest).long()
        codes = (weight / scales.double()[:, group_of]).round() + zeros[:, group_of]
        codes = codes.clamp(0, largest).long()
        return self.write(codes, zeros, scales, group_of), written.meant(codes, zeros, scales, group_of)


class TestAwq(Packed):
    part = "awq"
    dtypes = ("float64", "float32", "float16")
    skips = "layer.gate"
    scheme = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["layer.gate"],
    }

    def write(self, codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        return written.awq(codes, zeros, scales)


class TestGptq(Packed):
    part = "gptq"
    scheme: ClassVar[Mapping[str, Any]] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}

    def write(self, codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        return written.gptq(codes, zeros, scales, self.bits, 1)


class TestGptqActOrder(Packed):
    """Groups are cut in two by ranks, and differ from source to source."""

    part = "gptq"
    bits = 8
    scheme = {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"}

    def groups(self, columns: int) -> Tensor:
        return super().groups(columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]

    def write(self, codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        return written.gptq(codes, zeros, scales, self.bits, 2, group_of)


def _compressed(weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*gate"]}
    return config | {"config_groups": {"group_0": group}}


class TestCompressedTensors(Packed):
    part = "compressed-tensors"
    skips = "layer.gate"
    symmetric = True
    group = -1
    scheme = _compressed({"num_bits": 4, "symmetric": True, "strategy": "channel"})

    def write(self, codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        return written.compressed(codes, None, scales, self.bits)


class TestCompressedTensorsOfEightBits(Packed):
    """A group of 96 columns does not divide 256: the last one is shorter, and ranks begin within one."""

    part = "compressed-tensors"
    bits, group = 8, 96
    scheme = _compressed({"num_bits": 8, "symmetric": False, "strategy": "group", "group_size": 96})

    def write(self, codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> dict[str, Tensor]:
        return written.compressed(codes, zeros, scales, self.bits)


@pytest.mark.gpu
class TestAwqOnCuda(TestAwq):
    device = "cuda"
    dtypes = ("float32", "float16", "bfloat16")


@pytest.mark.gpu
class TestGptqActOrderOnCuda(TestGptqActOrder):
    device = "cuda"


@pytest.mark.gpu
class TestCompressedTensorsOnCuda(TestCompressedTensorsOfEightBits):
    device = "cuda"
