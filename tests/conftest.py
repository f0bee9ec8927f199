"""Fixtures that many tests share. Nothing here reaches the network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support-table", metavar="FILE", help="write docs/support.md from what passed")


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)  # the suite runs in parallel; more threads only fight
    if config.getoption("--support-table") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SupportTable(Path(config.getoption("--support-table"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    from pegboard.errors import PegboardError
    from pegboard.hub import resolve_model

    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if not os.environ.get("PEGBOARD_FULL"):
        skips["full"] = pytest.mark.skip(reason="full counts: run by `make test-full`")
    try:
        resolve_model("smollm2-135m-instruct")
    except PegboardError:
        skips["model"] = pytest.mark.skip(reason="run `pegboard models pull smollm2-135m-instruct` first")
    for item in items:
        item.user_properties += [("supports", list(mark.args)) for mark in item.iter_markers("supports")]
        for name, skip in skips.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


class SupportTable:
    """Collects what tests marked `supports(area, what)` showed, and writes the table of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: dict[tuple[str, str], set[str]] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                if name == "supports":
                    self.passed.setdefault((str(value[0]), str(value[1])), set()).add(report.nodeid.partition("[")[0])

    def pytest_sessionfinish(self) -> None:
        if not self.passed:
            return
        if self.failed:
            print(f"\n{self.path} not written: {len(self.failed)} tests failed")
            return
        lines = [
            "# What is supported",
            "",
            "Made by `make support` from test results: a row is here because the named test ran it and passed.",
            "Whatever is not here is refused, with a reason, when the engine is assembled or the request submitted.",
        ]
        for area in sorted({area for area, _ in self.passed}):
            lines += ["", f"## {area}", "", "| what | shown by |", "|---|---|"]
            rows = sorted((what, tests) for (a, what), tests in self.passed.items() if a == area)
            lines += [f"| {what} | {', '.join(f'`{test}`' for test in sorted(tests))} |" for what, tests in rows]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 layers, 4 query and 2 KV heads, vocabulary 211, context 512, no tokenizer."""
    from pegboard.testing.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", tokenizer=False)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Any]]:
    """Engine(...) that is closed when the test ends."""
    from pegboard import Engine

    made: list[Engine] = []

    def make(*args: Any, **settings: Any) -> Engine:
        made.append(Engine(*args, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
