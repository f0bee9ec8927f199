"""The torch ops against the suite that all ops are held to."""

from __future__ import annotations

import pytest

from pegboard.testing import OpsSuite


class TestTorchOps(OpsSuite):
    part = "torch"
    dtypes = ("float64", "float32", "float16", "bfloat16")


@pytest.mark.gpu
class TestTorchOpsOnCuda(TestTorchOps):
    device = "cuda"
