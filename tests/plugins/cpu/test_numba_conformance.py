"""The compiled CPU parts against the suites that all ops and backends are held to."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from pegboard.testing import AttentionSuite, OpsSuite
from pegboard_cpu.attention import NumbaAttention
from pegboard_cpu.ops import NumbaOps


class TestNumbaOps(OpsSuite):
    part = NumbaOps


class TestNumbaAttention(AttentionSuite):
    part = NumbaAttention
    phases = ("prefill", "decode")
