"""Examples are run as a user runs them: in a process of their own, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer and a chat template, and room for long texts."""
    from pegboard.testing.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("examples") / "model", max_position_embeddings=8192, vocab_size=300)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error"}


@pytest.fixture
def run_example(environment: dict[str, str]) -> Callable[..., list[str]]:
    """run_example("folder/script.py", arguments ...) -> the lines that it prints."""

    def run(script: str, *arguments: object) -> list[str]:
        path = EXAMPLES / script
        done = subprocess.run(
            [sys.executable, path.name, *map(str, arguments)],
            cwd=path.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run
