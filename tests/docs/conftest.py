"""Blocks of code in README.md and docs/ as test parameters, and the folder that their commands run in.

Comments before a block say what it is: `<!-- file: engine.toml -->` is written to that path for the others of its page;
`<!-- config -->` is a config; `<!-- continues -->` goes on with the names of the Python block before it;
`<!-- output -->` is what that block prints; `<!-- needs: model -->` runs where the model is; `<!-- not run: why -->`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_COMMENT = re.compile(r"<!--\s*([a-z ]+?)\s*(?::\s*(.+?)\s*)?-->")
_FENCE = re.compile(r"```(\w*)$")


@dataclass
class Block:
    page: Path
    #: Of the opening fence, from 1.
    line: int
    language: str
    text: str
    directives: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    directives: dict[str, str] = {}
    number = 0
    while number < len(lines):
        comment, fence = _COMMENT.fullmatch(lines[number]), _FENCE.match(lines[number])
        number += 1
        if comment:
            directives[comment[1]] = comment[2] or ""
        elif fence:
            end = lines.index("```", number)
            text = "\n".join(lines[number:end]) + "\n"
            found.append(Block(page, number, fence[1], text, directives))
            number, directives = end + 1, {}
        elif lines[number - 1].strip():
            directives = {}
    return found


BLOCKS = {page: blocks_of(page) for page in PAGES}


def _scripts() -> Iterator[list[Block]]:
    """Python blocks with those that continue them, each followed by what it prints, if that is said."""
    for blocks in BLOCKS.values():
        script: list[Block] = []
        for block in blocks:
            if block.language == "python" and not {"file", "not run"} & block.directives.keys():
                if script and "continues" not in block.directives:
                    yield script
                    script = []
                script.append(block)
            elif "output" in block.directives:
                script.append(block)
        if script:
            yield script


def _parameters(kind: str) -> list[tuple[str, object, bool]]:
    """(id, value, whether the model is needed)"""
    every = [block for blocks in BLOCKS.values() for block in blocks]
    if kind == "block":
        return [(block.label, block, False) for block in every]
    if kind == "script":
        return [(s[0].label, s, any("needs" in block.directives for block in s)) for s in _scripts()]
    if kind == "config_block":
        return [(block.label, block, False) for block in every if "config" in block.directives]
    if kind == "console":
        return [(b.label, b, "needs" in b.directives) for b in every if b.language == "console"]
    return [(page.name, page, False) for page in PAGES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for kind in ("block", "script", "config_block", "console", "page"):
        if kind in metafunc.fixturenames:
            metafunc.parametrize(
                kind,
                [
                    pytest.param(value, id=label, marks=[pytest.mark.model] if model else [])
                    for label, value, model in _parameters(kind)
                ],
            )


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """The folder with the files that a page shows; distributions among them are built and unpacked into `site`."""
    made: dict[Path, Path] = {}

    def folder(page: Path) -> Path:
        if page not in made:
            root = made[page] = tmp_path_factory.mktemp(page.stem)
            for block in BLOCKS[page]:
                if "file" in block.directives:
                    path = root / block.directives["file"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block.text, encoding="utf-8")
            for project in sorted(root.glob("*/pyproject.toml")):
                build = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
                subprocess.run([sys.executable, "-c", build, str(root)], cwd=project.parent, check=True)
            for wheel in root.glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(root / "site")
        return made[page]

    return folder


@pytest.fixture
def enter(folder_of: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Path]]:
    """enter(page): work in its folder, with its distributions installed. Modules from there are forgotten after."""
    entered: list[Path] = []

    def go(page: Path) -> Path:
        folder = folder_of(page)
        entered.append(folder)
        monkeypatch.chdir(folder)
        if (folder / "site").exists():
            monkeypatch.syspath_prepend(str(folder / "site"))
        return folder

    yield go
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if origin and any(Path(origin).is_relative_to(folder) for folder in entered):
            del sys.modules[name]
