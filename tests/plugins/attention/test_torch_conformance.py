"""The torch backend against the suite that every attention backend is held to."""

from __future__ import annotations

import pytest

from pegboard.testing import AttentionSuite


class TestTorchAttention(AttentionSuite):
    part = "torch"
    dtypes = ("float64", "float32", "float16", "bfloat16")
    claims = ("window", "softcap", "sinks", "verify", "ancestors")


@pytest.mark.gpu
class TestTorchAttentionOnCuda(TestTorchAttention):
    device = "cuda"
