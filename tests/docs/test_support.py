"""docs/support.md is what the marked tests say, no more and no less."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def marked() -> set[tuple[str, str, str]]:
    """(area, what, test) of every `@pytest.mark.supports`."""
    found = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.supports":
                        area, what = (ast.literal_eval(argument) for argument in mark.args)
                        found.add((area, what, f"{file.relative_to(ROOT)}::{node.name}"))
    return found


def listed() -> set[tuple[str, str, str]]:
    found, area = set(), ""
    for line in (ROOT / "docs/support.md").read_text().splitlines():
        if line.startswith("## "):
            area = line.removeprefix("## ")
        elif line.startswith("| ") and "`" in line:
            what, tests = line.strip("| ").split(" | ")
            found.update((area, what, test) for test in re.findall(r"`([^`]+)`", tests))
    return found


def test_every_row_is_shown_by_its_test() -> None:
    assert listed() <= marked()


def test_no_marked_test_is_left_out() -> None:
    """But for what this machine can't run: GPU tests, and fresh environments."""
    left_out = {row for row in marked() - listed() if not re.search(r"tests/gpu/|fresh_environment", row[2])}
    assert not left_out, "run `make support`"
