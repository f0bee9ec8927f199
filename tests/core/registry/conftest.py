"""Distributions that exist in a temporary folder only, and parts to offer."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_numbers = itertools.count()

HEADER = """
from pegboard.contracts.part import Part
from pegboard.registry.hookspecs import hookimpl
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """install(distribution, source) puts a distribution with one plugin on sys.path; returns the module's name.

    `{module}` in the source stands for that name. The usual imports are prepended unless `header` is off.
    """
    made: list[str] = []

    def make(distribution: str, source: str, *, version: str = "1.0", header: bool = True, plugin: str = "main") -> str:
        module = f"fake_plugin_{next(_numbers)}"
        folder = tmp_path / module
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        text = textwrap.dedent(source).replace("{module}", module)
        (folder / f"{module}.py").write_text(HEADER + text if header else text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[pegboard]\n{plugin} = {module}\n")
        monkeypatch.syspath_prepend(str(folder))
        made.append(module)
        return module

    yield make
    for module in made:
        sys.modules.pop(module, None)
