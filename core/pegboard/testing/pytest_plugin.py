"""pytest fixtures. Enable with `pytest_plugins = ["pegboard.testing.pytest_plugin"]` in the top conftest.py, or with
`-p pegboard.testing.pytest_plugin`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .clock import FakeClock
from .engines import isolated_engine
from .tiny import tiny_model


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 layers with a tokenizer, vocabulary 259, context 512."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", vocab_size=259)


@pytest.fixture
def make_isolated_engine(tiny_model_path: Path) -> Iterator[Callable[..., Any]]:
    """make_isolated_engine(model=None, plugins=(), **settings): an engine that sees no other plugins, closed when the
    test ends. Without a model it runs `tiny_model_path`."""
    with ExitStack() as stack:

        def make(model: str | Path | None = None, **settings: Any) -> Any:
            return stack.enter_context(isolated_engine(tiny_model_path if model is None else model, **settings))

        yield make


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that stands at 0."""
    return FakeClock()
