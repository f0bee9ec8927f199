"""What tests of kernels share. Compiles what production code launches for devices that are not here, and reads the
machine code; runs tests under Triton's interpreter."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Compiled:
    """One kernel that was launched, as the assembler made it."""

    kernel: str
    registers: int
    #: Bytes of spilled registers and other locals
    stack: int
    shared: int
    #: Instruction -> how often it stands in the code
    instructions: Counter[str]
    #: Triton's last representation before it leaves tensors and layouts behind
    layouts: str
    #: What the disassembler prints
    code: str


class _Device:
    """As much of a driver as compiling takes."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@functools.cache  # Triton keeps what it compiled for the process, too
def _read(name: str, code: bytes, shared: int, layouts: str) -> Compiled:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.cubin"
        path.write_bytes(code)
        command = [tool, "-res-usage", "-sass", path]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usages, _, sass = told.partition("\n\tcode for ")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", usages)
    assert usage is not None
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", sass, re.MULTILINE)
    return Compiled(name, int(usage[1]), int(usage[2]), shared, Counter(found), layouts, sass)


@pytest.fixture
def compile_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`with compile_for(90) as made:` launches compile for that capability and don't run; `made` lists them."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    @contextmanager
    def compiling(capability: int) -> Iterator[list[Compiled]]:
        made: list[Compiled] = []
        run = JITFunction.run

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **rest: Any) -> Any:
            kernel = run(self, *args, grid=grid, warmup=True, **rest)
            asm = kernel.asm
            made.append(_read(self.fn.__name__, asm["cubin"], kernel.metadata.shared, asm["ttgir"]))
            return kernel

        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", compile_only)
            patch.setattr(driver, "_active", _Device(capability))
            yield made

    return compiling


@pytest.fixture
def run_interpreted() -> Callable[[Path], str]:
    """run_interpreted(file): its tests pass in a process of their own, under Triton's interpreter; what they print."""

    def run(file: Path) -> str:
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    return run
