"""Kernels compile in the background from launches that are only noted; no GPU is needed for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from pegboard.runner.compiling.ahead import Compilation


@triton.jit
def add_one(x, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < count) + 1, at < count)


class _Device:
    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 91  # triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of kernels as they are compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", _Device())
    names: list[str] = []

    def listener(*, src: Any, **_rest: Any) -> None:
        names.append(src.name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    yield names
    add_one.device_caches.pop(91, None)


def finish(compilation: Compilation) -> None:
    end = time.monotonic() + 60
    while not compilation.over():
        assert time.monotonic() < end
        time.sleep(0.01)


def launches(*sizes: int) -> Callable[[], None]:
    def work() -> None:
        x = torch.empty(64)
        assert not x.any(), "what nobody has written is zero"
        for size in sizes:
            add_one[(1,)](x, 64, BLOCK=size)
        assert not x.any(), "nothing was launched"

    return work


def test_each_kernel_compiles_once(compiled: list[str]) -> None:
    compilation = Compilation("cuda")
    compilation.rehearse(launches(64, 32, 64, 64))
    finish(compilation)
    assert compiled == ["add_one", "add_one"]
    with pytest.raises(AttributeError):  # compiled, so that it is launched: and here is no device for it
        add_one[(1,)](torch.zeros(64), 64, BLOCK=32)
    assert len(compiled) == 2
    assert compilation.over()


def test_kernels_of_this_process_compile_in_turns_with_rehearsals(compiled: list[str]) -> None:
    compilation = Compilation("cuda")
    compilation._mode.kernels.clear()
    compilation.rehearse(launches(64, 32, 16))
    for kernel in compilation._mode.kernels.values():
        kernel.task = None  # as with a Triton that keeps them elsewhere
    compilation.rehearse(lambda: compiled.append("second"))
    assert compiled.index("second") >= 2, "all but one were waited for"
    finish(compilation)
    assert sorted(compiled) == ["add_one", "add_one", "add_one", "second"]


def test_a_launch_meanwhile_waits_for_its_kernel(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    compile_one = triton.compiler.compile

    def slowly(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return compile_one(*args, **kwargs)

    monkeypatch.setattr(triton.compiler, "compile", slowly)
    add_one.device_caches.pop(91, None)
    compilation = Compilation("cuda")
    compilation.rehearse(launches(16))
    assert begun.wait(60)
    assert not compilation.over()
    threading.Timer(0.2, go.set).start()
    with pytest.raises(AttributeError):
        add_one[(1,)](torch.zeros(64), 64, BLOCK=16)
    finish(compilation)
    assert compiled == ["add_one"]


def test_what_nobody_waited_for_compiles_at_its_launch(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard.runner.compiling.ahead.count_wanted", lambda: 1)
    compilation = Compilation("cuda")
    sizes = [1 << power for power in range(6)]
    compilation.rehearse(launches(*sizes))
    compilation._end()
    with pytest.raises(AttributeError):
        add_one[(1,)](torch.zeros(64), 64, BLOCK=sizes[-1])
    assert 1 <= len(compiled) <= len(sizes)


def test_other_threads_launch_as_ever(compiled: list[str]) -> None:
    failed: list[BaseException] = []

    def other() -> None:
        try:
            add_one[(1,)](torch.zeros(64), 64, BLOCK=8)
        except BaseException as error:
            failed.append(error)

    def work() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert compiled == ["add_one"], "compiled where it was launched, at once"
        assert torch.empty(3).sum() == 0

    compilation = Compilation("cuda")
    compilation.rehearse(work)
    assert failed, "it went on to the device, which is none"
    finish(compilation)


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(compiled: list[str]) -> None:
    compilation = Compilation("cuda")
    compilation.rehearse(launches(48))  # no power of two
    finish(compilation)
    with pytest.raises(Exception, match="power of 2"):
        add_one[(1,)](torch.zeros(64), 64, BLOCK=48)
