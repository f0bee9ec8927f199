"""Fixtures that many tests share. Nothing here reaches the network."""

from __future__ import annotations

import gc
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
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


class SupportTable:
    """Collects what tests marked `supports(area, what)` showed, and writes the table of it. Rows of tests that did not
    run, as those that need a GPU on a machine without one, stay as they were."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: dict[tuple[str, str], set[str]] = {}
        self.failed: set[str] = set()
        self.ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "call" and report.passed:
            test = report.nodeid.partition("[")[0]
            self.ran.add(test)
            for name, value in report.user_properties:
                if name == "supports":
                    self.passed.setdefault((str(value[0]), str(value[1])), set()).add(test)

    def _keep(self) -> None:
        """What the file says of tests that did not run."""
        area = ""
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            if line.startswith("## "):
                area = line[3:]
            elif line.startswith("| ") and "`" in line:
                what, tests = line.strip("| ").split(" | ")
                for test in tests.replace("`", "").split(", "):
                    if test not in self.ran:
                        self.passed.setdefault((area, what), set()).add(test)

    def pytest_sessionfinish(self) -> None:
        if not self.passed:
            return
        if self.failed:
            print(f"\n{self.path} not written: {len(self.failed)} tests failed")
            return
        self._keep()
        lines = [
            "# What is supported",
            "",
            "Made by `make support` from test results: a row is here because the named test ran it and passed, those",
            "of `tests/gpu` on an H200, the others on a CPU.",
            "Whatever is not here is refused, with a reason, when the engine is assembled or the request submitted.",
        ]
        for area in sorted({area for area, _ in self.passed}):
            lines += ["", f"## {area}", "", "| what | shown by |", "|---|---|"]
            rows = sorted((what, tests) for (a, what), tests in self.passed.items() if a == area)
            lines += [f"| {what} | {', '.join(f'`{test}`' for test in sorted(tests))} |" for what, tests in rows]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Closing an engine collects garbage: what libraries and earlier modules hold need not be looked at each time."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random Medusa heads and of a random EAGLE layer for `tiny_model`, by name: most of what they propose
    is refused."""
    import torch

    folder, size = tmp_path_factory.mktemp("heads"), 64
    generator = torch.Generator().manual_seed(0)
    medusa = {}
    for head in range(3):
        medusa[f"{head}.0.linear.weight"] = torch.randn(size, size, generator=generator) * 0.1
        medusa[f"{head}.0.linear.bias"] = torch.zeros(size)
    eagle = {"fc.weight": (size, 2 * size), "layers.0.post_attention_layernorm.weight": (size,)}
    eagle |= {f"layers.0.self_attn.{part}_proj.weight": (size, size) for part in "qkvo"}
    eagle |= {f"layers.0.mlp.{part}_proj.weight": (size, size) for part in ("gate", "up", "down")}
    layer = {name: torch.randn(shape, generator=generator) / 8 for name, shape in eagle.items()}
    config = {"hidden_size": size, "intermediate_size": size, "num_hidden_layers": 1, "num_attention_heads": 4}
    return {
        "medusa": _written(folder / "medusa", medusa, {"medusa_num_heads": 3, "medusa_num_layers": 1}),
        "eagle": _written(folder / "eagle", layer, {**config, "vocab_size": 211, "rope_theta": 10000.0}),
    }


def _written(path: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    import json

    from safetensors.torch import save_file

    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
