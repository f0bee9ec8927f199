"""Launches that compile in the background instead of running."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .worker import settle_keys
from .workers import CompileWorkers, count_wanted, is_kept

#: One rehearsal at a time in this process: it changes what a launch does.
_REHEARSING = threading.Lock()


class Compilation:
    """What runs inside `rehearse` computes nothing with Triton: its launches are noted, their kernels compile in the
    background and are loaded on `device`, and what they would have written is zero. Who launches such a kernel later
    waits for it alone."""

    def __init__(self, device: str) -> None:
        count = count_wanted()
        pool, workers = ThreadPoolExecutor(count, thread_name_prefix="pegboard-compile"), CompileWorkers(count)
        self._pool = pool
        self._mode = _noting_mode(pool, workers, device)
        self._context = copy_context()  # compiling in the background is a mode of this context alone
        self._context.run(self._mode.__enter__)
        #: What has not begun to compile when nobody wants it any more does so when it is launched.
        self._end = weakref.finalize(self, _end, pool, workers)

    def rehearse(self, work: Callable[[], object]) -> None:
        """Runs `work` in this thread. Kernels that can't compile in other processes do so in turns with such work, for
        both want Python's lock: they begin when it is over, and all but one, in case it takes much longer than the
        others, are there before the next begins."""
        here = [kernel.future for kernel in self._mode.kernels.values() if kernel.task is None]
        for _ in zip(range(len(here) - 1), as_completed(here), strict=False):
            pass
        with _REHEARSING, _launches_only_compile(), _ZeroFilled():
            self._context.run(work)
        for kernel in self._mode.kernels.values():
            kernel.start()

    def over(self) -> bool:
        """Whether all that was noted is compiled and loaded, as a recording needs it. A kernel that can't be says so
        when it is launched."""
        if not all(kernel.future.done() for kernel in self._mode.kernels.values()):
            return False
        for kernel in self._mode.kernels.values():
            kernel.result(ignore_errors=True)
        if self._end.alive:
            self._pool.submit(self._end)  # the processes take a moment to go
        return True


def _end(pool: ThreadPoolExecutor, workers: CompileWorkers) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    workers.close()


def _noting_mode(pool: ThreadPoolExecutor, workers: CompileWorkers, device: str) -> Any:
    from triton import AsyncCompileMode, FutureKernel

    #: A kernel is read from the cache under Python's lock: no more than one of them disturbs a request.
    reading = threading.Lock()

    class Pending(FutureKernel):  # type: ignore[misc]
        kernel: Any
        #: None: nobody compiles it yet.
        future: Any

        def __init__(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> None:
            super().__init__(finalize_fn, None)
            self._key, self._compile_fn = key, compile_fn
            #: None: it must compile in this process.
            self.task = _task(compile_fn)

        def start(self) -> None:
            if self.future is None:
                self.future = pool.submit(self._compile)

        def _compile(self) -> Any:
            task = self.task
            kept = task is not None and (is_kept(self._key, task[0].name) or workers.compile(*task))
            with reading if kept else contextlib.nullcontext():
                kernel = self._compile_fn()
            # Triton compiles what launches it, too, in C; an error is that of the first launch
            with contextlib.suppress(Exception), torch.cuda.device(device):
                kernel.run  # noqa: B018 - a property that loads it
            return kernel

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
                kernel = self.kernels[key] = Pending(key, compile_fn, finalize_fn)
                finalize_fn(kernel)  # who launches it meanwhile waits for it, with triton 3.6 too
                if kernel.task is not None:
                    kernel.start()
            return kernel

    return Noting()


def _task(compile_fn: Callable[[], Any]) -> tuple[Any, Any, dict[str, Any]] | None:
    """What it gives `triton.compile`: source, target, options. None: this Triton keeps them elsewhere."""
    held = inspect.getclosurevars(compile_fn).nonlocals
    try:
        return held["src"], held["target"], dict(held["options"].__dict__)
    except (KeyError, AttributeError):
        return None


@contextlib.contextmanager
def _launches_only_compile() -> Iterator[None]:
    """In this thread; a tuner has nothing to time here and is left alone."""
    from triton.runtime import Autotuner, JITFunction

    owner, seen = threading.get_ident(), set[int]()
    launch, tune = JITFunction.run, Autotuner.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **rest: Any) -> Any:
        if threading.get_ident() != owner:
            return launch(self, *args, grid=grid, warmup=warmup, **rest)
        settle_keys(self, seen)
        return launch(self, *args, grid=grid, warmup=True, **rest)

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
