"""Engines are opened and closed again and again, and side by side: nothing is left, and none feels another."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine, SamplingParams
from pegboard.testing import isolated_engine, isolated_registry

FULL = bool(os.environ.get("PEGBOARD_FULL"))
CYCLES = 50 if FULL else 12
#: With every allocation traced, which is slow: each kind of cycle once.
TRACED = 50 if FULL else 6
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [list(range(3, 40)), [5, 6, 7]]
PAGE = 4096


def tensor_bytes() -> int:
    """Bytes of every tensor that lives, each storage once."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def resident() -> int:
    """Bytes of this process in memory, without what malloc could give back."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def cycle(path: Path, index: int) -> None:
    """Open, serve, close; every second engine with other parts, every third closed with a request under way."""
    settings: dict[str, Any] = {"scheduler": "static"} if index % 2 else {"page_size": 32}
    with Engine(path, device="cpu", run_ahead=index % 3, **settings) as engine:
        engine.generate(PROMPTS, GREEDY)
        if index % 3 == 2:
            engine.submit(PROMPTS[0], SamplingParams(max_tokens=300, ignore_eos=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, trims glibc's memory")
@pytest.mark.long
def test_opening_and_closing_again_and_again_leaves_nothing(tiny_path: Path) -> None:
    """Memory is what it was after the first cycles, which fill the caches of libraries: tensors and threads to the
    byte, the process but for what fragments of freed memory take."""
    for index in range(6):  # each kind of cycle once
        cycle(tiny_path, index)
    gc.collect()
    first, before = (tensor_bytes(), threading.active_count()), resident()
    for index in range(CYCLES):
        cycle(tiny_path, index)
    gc.collect()
    assert (tensor_bytes(), threading.active_count()) == first
    grown = resident() - before
    # A tiny engine holds some 4 MB: what every third one leaves would show in the reduced count, too.
    assert grown < 12 * 2**20, f"{grown} bytes more are resident after {CYCLES} cycles"


def test_python_objects_do_not_add_up(tiny_path: Path) -> None:
    """By itself: the records of tracemalloc are memory of the process, too."""
    for index in range(6):
        cycle(tiny_path, index)
    tracemalloc.start()
    try:
        cycle(tiny_path, 0)
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        for index in range(1, TRACED + 1):
            cycle(tiny_path, index)
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
    # A few kB a cycle, ever fewer, are the interpreter's own; 300 kB are far below one engine a few cycles.
    assert traced < 300_000, f"{traced} bytes of Python objects in {TRACED} cycles"


def test_engines_with_different_plugins_in_threads_do_not_feel_each_other(tiny_path: Path) -> None:
    """Four kinds of engine, each made, used and closed by its own thread, time after time: every id is right."""
    torch_parts = {role: isolated_registry().get(role, "torch").load() for role in ("attention", "sampler")}
    kinds: list[dict[str, Any]] = [
        {"scheduler": "continuous", "page_size": 16},
        {"scheduler": "static", "run_ahead": 2, "max_rows": 3},
        {"plugins": [plugin_of("attention", torch_parts["attention"])], "attention": "mine"},
        {"plugins": [plugin_of("sampler", torch_parts["sampler"])], "sampler": "mine", "page_size": 64},
    ]
    with Engine(tiny_path, device="cpu", dtype="float64") as engine:
        expected = [[o.token_ids for o in engine.generate(PROMPTS, sampling)] for sampling in (GREEDY, SAMPLED)]
    wrong: list[Any] = []

    def drive(settings: dict[str, Any]) -> None:
        try:
            for _ in range(4 if FULL else 2):
                with isolated_engine(tiny_path, dtype="float64", **settings) as engine:
                    for _ in range(3):
                        found = [[o.token_ids for o in engine.generate(PROMPTS, s)] for s in (GREEDY, SAMPLED)]
                        if found != expected:
                            wrong.append((settings, found))
        except BaseException as error:
            wrong.append((settings, error))

    threads = [threading.Thread(target=drive, args=(settings,), daemon=True) for settings in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def plugin_of(role: str, base: type) -> Any:
    """A plugin whose part is a class of its own, made here."""
    from pegboard import Part, hookimpl

    class Mine:
        @hookimpl
        def pegboard_parts(self) -> list[Part]:
            return [Part(role=role, name="mine", factory=type("Mine", (base,), {}), summary="A class of its own")]

    return Mine()
