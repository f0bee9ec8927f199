"""The example scripts do what their READMEs say."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., list[str]]


def of(lines: list[str], name: str) -> list[str]:
    return [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")]


def test_embed_sync(run_example: Run, tiny_text_model: Path) -> None:
    lines = run_example("embed_sync/embed.py", tiny_text_model, "--max-tokens", 6)
    [finish] = of(lines, "finish")
    assert finish in ("length 6", *(f"stop {count}" for count in range(1, 7)))
    assert len(of(lines, "many")) == 3
    assert "the prompt holds 1000000000, must be token ids from 0 to 299" in of(lines, "many")[2]
    [refused] = of(lines, "refused")
    assert "max_tokens is 0" in refused
    assert "top_p is 2.0" in refused


def test_embed_asyncio(run_example: Run, tiny_text_model: Path) -> None:
    lines = run_example("embed_asyncio/embed.py", tiny_text_model, "--max-tokens", 6)
    assert of(lines, "many") == ["[6, 6, 6]"]
    assert of(lines, "cancelled") == ["True running: 0"]
    assert of(lines, "late") == ["deadline"]
    assert "deadline" in of(lines, "raised")[0]


def test_two_engines(run_example: Run, tiny_text_model: Path) -> None:
    lines = run_example("two_engines/two.py", tiny_text_model, "--max-tokens", 6)
    assert of(lines, "exact")[0].startswith("none, continuous, weights")
    assert of(lines, "small")[0].startswith("int8-cpu, static, weights")
    assert all(isinstance(ast.literal_eval(of(lines, name)[1]), str) for name in ("exact", "small"))
    assert of(lines, "small goes on") == ["6 tokens"]


def test_assemble_from_config(run_example: Run, tiny_text_model: Path) -> None:
    lines = run_example("assemble_from_config/assemble.py", tiny_text_model, "--max-tokens", 6)
    assert of(lines, "equal") == ["True"]
    assert of(lines, "chunk") == ["32 and still 64"]
    assert len(of(lines, "refused")) == 2
    assert of(lines, "rows") == ["2"]
    assert of(lines, "scheduler") == ["continuous (asked: continuous)"]
    assert of(lines, "attention")[0].endswith("(asked: auto)")


@pytest.mark.model
def test_the_real_model_answers(run_example: Run) -> None:
    lines = run_example("embed_sync/embed.py")
    assert of(lines, "answer") == ["The capital of France is Paris."]
    assert of(lines, "finish") == ["stop 8"]


@pytest.mark.parametrize("name", ["engine.toml", "engine.yaml"])
def test_config_files_are_valid(name: str) -> None:
    assert load_config(EXAMPLES / "assemble_from_config" / name).max_rows == 4


def test_every_example_is_listed_and_has_a_readme() -> None:
    listed = set(re.findall(r"^\| \[(\w+)\]\(\1/README.md\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    assert listed == folders
    assert all((EXAMPLES / name / "README.md").exists() for name in folders)
