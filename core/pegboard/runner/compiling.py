"""Triton kernels compiled before they are needed, many at a time: one after another they take seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger("pegboard")

#: More of them compile no faster: a third of the work holds Python's lock.
_MOST_THREADS = 8
#: One rehearsal at a time in this process: it changes what a launch does.
_REHEARSING = threading.Lock()


class Compilation:
    """What runs inside `rehearse` computes nothing with Triton: its launches are noted, their kernels compile in the
    background, and what they would have written is zero. Who launches such a kernel later waits for it alone."""

    def __init__(self) -> None:
        threads = min(os.cpu_count() or 1, _MOST_THREADS)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pegboard-compile")
        self._mode = _noting_mode(self._pool)
        self._context = copy_context()  # compiling in the background is a mode of this context alone
        self._context.run(self._mode.__enter__)
        #: What has not begun to compile when nobody wants it any more does so when it is launched.
        self._end = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def rehearse(self, work: Callable[[], object]) -> None:
        """Runs `work` in this thread. Compiling begins when it is over: both want Python's lock."""
        with _REHEARSING, _launches_only_compile(), _ZeroFilled():
            self._context.run(work)
        for kernel in self._mode.kernels.values():
            kernel.start()

    def wait(self, left: int) -> None:
        """Until no more than `left` kernels are not compiled yet."""
        futures = [kernel.future for kernel in self._mode.kernels.values()]
        for _ in zip(range(len(futures) - left), as_completed(futures), strict=False):
            pass

    def over(self) -> bool:
        """Whether all that was noted is compiled. It is then loaded on the current device, as a recording needs it. A
        kernel that can't be compiled says so when it is launched."""
        if not all(kernel.future.done() for kernel in self._mode.kernels.values()):
            return False
        for kernel in self._mode.kernels.values():
            with contextlib.suppress(Exception):
                kernel.result().run  # noqa: B018 - a property that loads it
        self._end()
        return True


def _noting_mode(pool: ThreadPoolExecutor) -> Any:
    from triton import AsyncCompileMode, FutureKernel

    class Pending(FutureKernel):  # type: ignore[misc]
        kernel: Any
        #: None: nobody compiles it yet.
        future: Any

        def __init__(self, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> None:
            super().__init__(finalize_fn, None)
            self._compile_fn = compile_fn

        def start(self) -> None:
            if self.future is None:
                self.future = pool.submit(self._compile_fn)

        def result(self, ignore_errors: bool = False) -> Any:
            if self.kernel is None and (self.future is None or self.future.cancelled()):
                self.kernel = self._compile_fn()
                self.finalize_compile(self.kernel)
            return super().result(ignore_errors)

    class Noting(AsyncCompileMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(pool)
            self.kernels: dict[Any, Pending] = {}

        def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> Pending:
            kernel = self.kernels.get(key)
            if kernel is None:
                kernel = self.kernels[key] = Pending(compile_fn, finalize_fn)
                finalize_fn(kernel)  # who launches it meanwhile waits for it, with triton 3.6 too
            return kernel

    return Noting()


@contextlib.contextmanager
def _launches_only_compile() -> Iterator[None]:
    """In this thread; a tuner has nothing to time here and is left alone."""
    from triton.runtime import Autotuner, JITFunction

    owner = threading.get_ident()
    launch, tune = JITFunction.run, Autotuner.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **rest: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or threading.get_ident() == owner, **rest)

    def tune_not(self: Any, *args: Any, **rest: Any) -> Any:
        return None if threading.get_ident() == owner else tune(self, *args, **rest)

    JITFunction.run, Autotuner.run = compile_only, tune_not
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = launch, tune


class _ZeroFilled(TorchFunctionMode):
    """New memory is zero: an id, a position or an index that nobody has computed is one that exists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _ALLOCATING else made


_ALLOCATING = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
