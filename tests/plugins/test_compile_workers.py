"""Kernels compile in processes of their own, which leave them in Triton's cache."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pegboard.runner.compiling.ahead import Compilation
from pegboard.runner.compiling.workers import CompileWorkers
from pegboard_ops import embedding, held_rows

PLUGINS = Path(embedding.__file__).parents[2]


class _Device:
    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 92  # triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each kernel that this process got: whether it was in the cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", _Device())
    found: list[bool] = []

    def listener(*, cache_hit: bool, **_rest: Any) -> None:
        found.append(cache_hit)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    yield found
    embedding.gather_rows.device_caches.pop(92, None)


def launch() -> None:
    ids, table, out = torch.zeros(4, dtype=torch.int64), torch.zeros(8, 16), torch.zeros(4, 16)
    embedding.gather_rows[(4, 1)](ids, table, out, 16, E=16, BLOCK=16, PDL=False)


def finish(compilation: Compilation) -> CompileWorkers:
    workers: CompileWorkers = compilation._end.peek()[2][1]
    end = time.monotonic() + 60
    while not compilation.over():
        assert time.monotonic() < end
        time.sleep(0.01)
    return workers


def test_this_process_reads_what_another_compiled(hits: list[bool]) -> None:
    compilation = Compilation("cuda")
    compilation.rehearse(launch)
    workers = finish(compilation)
    assert hits == [True]
    end = time.monotonic() + 60
    while workers._all:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_in_the_cache_begins_no_processes(hits: list[bool]) -> None:
    compilation = Compilation("cuda")
    compilation.rehearse(launch)
    finish(compilation)
    embedding.gather_rows.device_caches.pop(92)
    again = Compilation("cuda")
    again.rehearse(launch)
    workers = finish(again)
    assert hits == [True, True]
    assert not workers._all


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_what_no_process_compiles_is_compiled_here(
    hits: list[bool], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    compilation = Compilation("cuda")
    compilation.rehearse(launch)
    finish(compilation)
    assert hits == [False]


def test_an_interpreter_that_can_not_run_again_begins_none(hits: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", None)
    compilation = Compilation("cuda")
    compilation.rehearse(launch)
    finish(compilation)
    assert hits == [False]


def test_the_same_bytes_as_here(hits: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = Compilation("cuda")
    compilation.rehearse(launch)
    finish(compilation)
    (there,) = (tmp_path / "triton").rglob("*.cubin")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    embedding.gather_rows.device_caches.pop(92)
    with pytest.raises(AttributeError):  # here is no device to launch it on
        launch()
    assert hits == [True, False]
    (here,) = (tmp_path / "here").rglob("*.cubin")
    assert there.read_bytes() == here.read_bytes()


def test_first_party_kernels_need_no_torch() -> None:
    """A process that compiles is ready before torch could be imported."""
    kernels = [
        path for path in PLUGINS.rglob("*.py") if re.search(r"^@(triton|gluon)\.jit", path.read_text(), re.MULTILINE)
    ]
    assert Path(held_rows.__file__) in kernels
    names = [".".join(path.relative_to(PLUGINS).with_suffix("").parts[1:]) for path in kernels]
    check = "importlib.import_module(name); assert 'torch' not in sys.modules, name"
    code = f"import importlib, sys\nfor name in sys.argv[1:]:\n    {check}"
    subprocess.run([sys.executable, "-c", code, *names], check=True)


@pytest.mark.parametrize("begun", [False, True])
def test_nobody_waits_for_workers_that_are_gone(begun: bool) -> None:
    workers = CompileWorkers(1)
    if begun:
        workers.begin()
    workers.close()
    assert not workers.compile(None, None, {})
    assert not workers.compile(None, None, {})
    workers.close()


def test_keys_do_not_depend_on_what_was_compiled_before() -> None:
    """Triton's own do: without `settle_keys` the second of these is another."""
    code = """
from pegboard.runner.compiling.worker import settle_keys
from pegboard_sampling.fused import choosing, gathering, picking, selecting
seen = set()
for function in {functions}:
    settle_keys(function, seen)
print(choosing.choose.cache_key)
"""
    orders = ("[choosing.choose]", "[selecting.select, gathering.gather_candidates, picking.pick, choosing.choose]")
    programs = [code.format(functions=functions) for functions in orders]
    first, second = (subprocess.check_output([sys.executable, "-c", program]) for program in programs)
    assert first == second
