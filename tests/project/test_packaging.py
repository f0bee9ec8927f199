"""The wheel holds every package, and works in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=300)
    return next(out.glob("pegboard-*.whl"))


def packages() -> list[Path]:
    return [ROOT / "core/pegboard", *sorted(ROOT.glob("plugins/*/pegboard_*"))]


def test_wheel_holds_every_source_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in packages():
        assert f"{package.name}/py.typed" in names
        for file in package.rglob("*.py"):
            assert str(file.relative_to(package.parent)) in names
    entry_points = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert all(f"{package.name}.manifest" in entry_points for package in packages()[1:])


def test_wheel_holds_the_templates_whole(wheel: Path) -> None:
    """Hidden files, READMEs and workflows, too: `pegboard plugins new` copies them."""
    names = set(zipfile.ZipFile(wheel).namelist())
    root = ROOT / "core" / "pegboard" / "templates"
    files = {file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert {".gitignore", "tests.yml", "README.md", "pyproject.toml"} <= {file.name for file in files}
    for file in files:
        assert f"pegboard/templates/{file.relative_to(root).as_posix()}" in names
    assert not [name for name in names if name.startswith("examples/")]


def test_editable_install_is_a_plain_path_file() -> None:
    """Static lines, no import hook: type checkers and editors resolve the packages."""
    import pegboard

    if "site-packages" in str(pegboard.__file__):
        pytest.skip("not an editable install")
    site = Path(next(p for p in sys.path if p.endswith("site-packages")))
    lines = [line for file in site.glob("*pegboard*.pth") for line in file.read_text().splitlines()]
    assert {Path(line).resolve() for line in lines} == {package.parent for package in packages()}


@pytest.mark.supports("Install", "from a wheel, outside the repository")
@pytest.mark.full
@pytest.mark.model
def test_wheel_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(pip, check=True, timeout=1200)
    from pegboard.hub import resolve_model

    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    pegboard = str(venv / "bin/pegboard")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [pegboard, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = json.loads(run("plugins", "list", "--json"))
    assert not listed["broken"]
    model = str(resolve_model("smollm2-135m-instruct"))
    question = ["--chat", "--prompt", "Count from 1 to 20.", "--max-tokens", "8", "--temperature", "0", "--json"]
    answer = json.loads(run("generate", "--model", model, *question))
    assert answer["token_ids"] == [33, 30, 216, 33, 198, 34, 30, 216]
    assert answer["finish_reason"] == "length"
    assert answer["metrics"]["output_tokens"] == 8
