"""The torch sampler against the suite that every sampler is held to."""

from __future__ import annotations

import pytest

from pegboard.testing import SamplerSuite


class TestTorchSampler(SamplerSuite):
    part = "torch"
    dtypes = ("float64", "float32", "float16", "bfloat16")
    claims = ("verify", "trees", "batch_invariant")


@pytest.mark.gpu
class TestTorchSamplerOnCuda(TestTorchSampler):
    device = "cuda"
