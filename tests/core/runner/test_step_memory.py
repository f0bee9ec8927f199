"""Pages of memory that steps on a CPU fault in. In processes of their own: the thresholds are the process's."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pegboard.testing import tiny_model

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")


def run(body: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_what_a_prompt_frees_serves_the_next(tmp_path: Path) -> None:
    """Buffers of 6 MiB and less, 8 layers. Where each is mapped anew, every prompt faults in several thousand pages.
    One of the first few may still find its buffers in other places, and fault in one of them."""
    path = tiny_model(
        tmp_path / "model",
        hidden_size=256,
        intermediate_size=1536,
        num_hidden_layers=8,
        max_position_embeddings=1024,
        tokenizer=False,
    )
    body = f"""
    import resource
    from pegboard import Engine, SamplingParams

    settings = dict(device="cpu", dtype="float32", threads=1, max_rows=1, max_length=600)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with Engine({str(path)!r}, cache={{"use": "paged", "options": {{"prefix_reuse": False}}}}, **settings) as engine:
        faults = []
        for turn in range(9):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            engine.generate([[3 + (turn + 5 * i) % 190 for i in range(512)]], sampling)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(sorted(faults[2:])[3])
    """
    assert run(body) < 250


def test_what_is_kept_is_given_back() -> None:
    body = """
    import os
    from pathlib import Path
    import torch
    from pegboard.runner import step_memory

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    step_memory.keep()
    blocks = [torch.empty(6 << 18).fill_(1) for _ in range(8)]
    del blocks
    kept = resident()
    step_memory.give_back()
    print(kept - resident())
    """
    assert run(body) > 40
