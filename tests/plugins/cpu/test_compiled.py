"""Where kernels run and where they come from: torch's threads, the disk, other CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from pegboard_cpu import team, vectors

#: Ops and attention against float64; prints the width of vectors and how many tests passed.
BODY = """
import torch
torch.set_num_threads(1)
from pegboard.testing import AttentionSuite, OpsSuite, run_suite
from pegboard_cpu import vectors
from pegboard_cpu.attention import NumbaAttention
from pegboard_cpu.ops import NumbaOps

class Ops(OpsSuite):
    part = NumbaOps
    grid = "small"

class Attention(AttentionSuite):
    part = NumbaAttention
    phases = ("prefill", "decode")
    grid = "small"

outcomes = run_suite(Ops, "activation or (project and 7)") + run_suite(Attention, "reference or sinks")
failed = [outcome for outcome in outcomes if outcome.result == "failed"]
assert not failed, failed[0].reason
print(vectors.WIDTH, sum(outcome.result == "passed" for outcome in outcomes))
"""


def run(body: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


@pytest.mark.long
def test_what_the_disk_gives_is_right(tmp_path: Path) -> None:
    """Other code than what ran when it was compiled: a kernel from the disk holds its own copy of all it calls."""
    first = run(BODY, NUMBA_CACHE_DIR=str(tmp_path))
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb*")}
    assert len([file for file in kept if file.suffix == ".nbc"]) == 6
    assert run(BODY, NUMBA_CACHE_DIR=str(tmp_path)) == first
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb*")} == kept
    assert int(first[1]) > 10


@pytest.mark.skipif(vectors.WIDTH != 16, reason="this CPU has no wider vectors than AVX2's")
def test_a_cpu_with_avx2(tmp_path: Path) -> None:
    features = "+avx2,+fma,+avx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+bmi,+bmi2,+popcnt,+cx16,+lzcnt,+64bit"
    width, passed = run(BODY, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path))
    assert (width, int(passed) > 10) == ("8", True)


def test_a_kernel_that_cannot_be_kept_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """Source without a file has no place beside it; numba finds none either where no folder can be written."""
    space: dict[str, Any] = {}
    exec(compile("def nothing(call):\n    pass\n", "<nowhere>", "exec"), space)
    with caplog.at_level("INFO", logger="pegboard"):
        assert vectors.kernel(space["nothing"]).address
    assert "nothing is compiled anew" in caplog.text


def test_there_is_one_openmp_runtime() -> None:
    """torch's own: a second team of threads on the same cores makes both wait."""
    body = """
    import torch
    from pegboard_cpu.attention import NumbaAttention
    from pegboard_cpu.ops import NumbaOps
    NumbaOps(False)
    torch.ones(300, 300) @ torch.ones(300, 300)
    files = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}
    print(*files)
    """
    assert len(run(body)) == 1


def test_without_openmp_s_names_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert team.refusals() == []
    monkeypatch.setattr(team, "address_of", lambda name: None)
    assert team.refusals() == [
        "needs torch's OpenMP runtime to have GOMP_parallel and omp_get_num_threads and omp_get_thread_num, as on Linux"
    ]
