"""The first-party quantizers against the suite that every quantizer is held to."""

from __future__ import annotations

import pytest

from pegboard.testing import QuantizerSuite
from pegboard_quant.int8_products import best_product

needs_kernels = pytest.mark.skipif(best_product() is None, reason="this CPU or torch multiplies no bytes")


class TestDense(QuantizerSuite):
    part = "none"
    dtypes = ("float64", "float32", "float16", "bfloat16")


class TestDenseUnpacked(TestDense):
    options = {"pack": False}


class TestDenseOfHalves(TestDense):
    storages = ("bfloat16",)


@pytest.mark.gpu
class TestDenseOnCuda(TestDense):
    device = "cuda"


@needs_kernels
class TestInt8Cpu(QuantizerSuite):
    part = "int8-cpu"
    claims = ("batch_invariant",)
    # Weights are rounded to 127 steps of the largest of their channel: 0.7 % of a row, here
    error = 1e-2


@needs_kernels
class TestInt8CpuOfOneByte(TestInt8Cpu):
    options = {"activations": "int8"}
    error = 1.5e-2  # activations are rounded likewise


@needs_kernels
class TestInt8CpuWithFloat32Prefill(TestInt8Cpu):
    options = {"prefill": "float32"}
    claims = ()
