"""The fused sampler against the suite that every sampler is held to: on a CUDA device, and on a CPU under Triton's
interpreter, which is chosen when a kernel is defined and so has a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from pegboard.contracts.device import DeviceFacts
from pegboard.contracts.sampler import SamplerNeed
from pegboard.testing import SamplerSuite
from pegboard_sampling.fused.sampler import FusedSampler

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Interpreted(FusedSampler):
    @classmethod
    def refusals(cls, need: SamplerNeed, options: Any) -> Sequence[str]:
        return FusedSampler.refusals(_on_cuda(need), options)

    @classmethod
    def create(cls, need: SamplerNeed, options: Any) -> Self:
        return cls(need, interpreted=True)


def _on_cuda(need: SamplerNeed) -> SamplerNeed:
    return SamplerNeed(
        device=DeviceFacts(type="cuda", capability=(8, 0)),
        vocab_size=need.vocab_size,
        slots=need.slots,
        max_length=need.max_length,
        max_drafts=need.max_drafts,
    )


if INTERPRETED:
    # numpy warns of infinities that a device computes and drops
    @pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
    class TestInterpreted(SamplerSuite):
        part = Interpreted
        grid = "small"
        dtypes = ("float32", "float16")
        claims = ("batch_invariant",)
        exempt = {"test_distribution": "takes thousands of launches, each some seconds: held on a CUDA device"}
        test_distribution = None


@pytest.mark.gpu
class TestOnCuda(SamplerSuite):
    part = FusedSampler
    device = "cuda"
    dtypes = ("float32", "float16", "bfloat16")
    claims = ("batch_invariant",)


@pytest.mark.skipif(INTERPRETED, reason="runs in itself")
def test_under_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
