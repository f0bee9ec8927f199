"""Kernels compile on the oldest and the newest Triton that they are for, beside the one that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: What an assembler makes of a kernel differs; so of the 4-bit products only that there is code.
TESTS = [
    "quant/int4/test_int4_code.py::test_all_kernels_compile",
    "ops/test_triton_ops_code.py",
    "sampling/test_fused_code.py",
]


@pytest.mark.full
@pytest.mark.parametrize("release", ["3.6.0", "3.9.0"])
def test_kernels_compile_on(release: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, f"triton=={release}"], check=True, timeout=600)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    told = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    found = subprocess.run(told, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.strip() == release
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not full"]
    command += ["-W", "ignore", *(str(HERE / test) for test in TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
