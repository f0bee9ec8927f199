"""The Triton backends against the suite that every attention backend is held to: on a GPU, and the portable kernels
with eight-bit caches under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from pegboard.contracts.attention import AttentionLayer, AttentionNeed  # noqa: E402
from pegboard.testing import AttentionSuite  # noqa: E402
from pegboard_attention.flash_attention_2.backend import FlashAttention2  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
on_gpu = [pytest.mark.gpu, compiled]


@pytest.mark.supports("Attention", "INT8 and FP8 K/V caches, prefill (part flash_attention_2)")
@compiled
@pytest.mark.long
def test_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 25, done.stdout


class QuantizedSuite(AttentionSuite):
    """Every step over a cache of `kv_dtype`."""

    part = FlashAttention2
    kv_dtype = "int8"

    @classmethod
    def need(cls, dtype: str, phase: Any, *layers: AttentionLayer, **changes: Any) -> AttentionNeed:
        return super().need(dtype, phase, *layers, **{"kv_dtype": cls.kv_dtype, **changes})


class Interpreted(QuantizedSuite):
    grid = "small"
    phases = ("prefill",)
    dtypes = ("float16",)
    page_sizes = (16,)
    head_sizes = (64, 72)
    ratios = (3,)
    windows = (5,)
    claims = ("window", "softcap", "sinks", "batch_invariant", "int8", "float8_e4m3fn")


@interpreted
class TestInterpretedInt8(Interpreted):
    pass


@interpreted
@pytest.mark.full
class TestInterpretedFloat8(Interpreted):
    kv_dtype = "float8_e4m3fn"


class OnCuda(QuantizedSuite):
    part = "flash_attention_2"
    device = "cuda"
    phases = ("prefill",)
    dtypes = ("bfloat16", "float16")
    page_sizes = (16, 64, 128)
    claims = ("window", "softcap", "sinks", "batch_invariant", "int8", "float8_e4m3fn")


class TestInt8OnCuda(OnCuda):
    pytestmark = on_gpu


class TestFloat8OnCuda(OnCuda):
    pytestmark = on_gpu
    kv_dtype = "float8_e4m3fn"


class TestFlashAttention2OnCuda(AttentionSuite):
    pytestmark = on_gpu
    part = "flash_attention_2"
    device = "cuda"
    phases = ("prefill",)
    dtypes = ("bfloat16", "float16")
    page_sizes = (16, 64, 128)
    claims = OnCuda.claims


class TestFlashDecodingOnCuda(AttentionSuite):
    pytestmark = on_gpu
    part = "flash_decoding"
    device = "cuda"
    phases = ("decode",)
    dtypes = ("bfloat16", "float16", "float32")
    page_sizes = (16, 64, 128)
    claims = ("window", "softcap", "sinks", "verify", "ancestors", "batch_invariant", "int8", "float8_e4m3fn")
