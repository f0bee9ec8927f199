"""What `pegboard plugins new` writes works untouched: it installs, its tests pass, an engine uses it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

import pegboard.scaffold
from pegboard import PluginError
from pegboard.cli.main import main
from pegboard.scaffold import TEMPLATE_ROLES, new_plugin

ROOT = Path(__file__).parents[3]
#: Of each role a name that collides with as much as possible in its template.
NAMES = {
    "attention": "row",
    "cache": "Pages.and_held",
    "scheduler": "ledger-scheduler",
    "sampler": "slot2",
    "quantizer": "int4-linear",
    "logits_processor": "text-arguments",
    "speculator": "draft-table",
}
#: Standard tests that the ordinary run leaves out: they take longer than all others together.
SLOW = "not test_random_use and not test_long_random_use and not test_many_cancels and not test_distribution"


def run(*command: str, cwd: Path, paths: Sequence[Path] = (), timeout: int = 300) -> str:
    """With `paths` in front of this process's own; without them in an environment that knows nothing of it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTEST_ADDOPTS", "PEGBOARD_FULL")}
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [environment.get("PYTHONPATH")])])
    else:
        environment = {key: value for key, value in environment.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_their_tests_pass_where_they_lie(tmp_path: Path) -> None:
    """The suite of each role, the tests of its own, and an engine with it: from the folders, without an installation,
    in one process, since starting one takes longer than the tests."""
    made = [new_plugin(role, NAMES[role], tmp_path / f"a-{role}") for role in TEMPLATE_ROLES]
    paths = [plugin.folder for plugin in made]
    names = [plugin.package for plugin in made]
    code = f"import sys, {', '.join(names)}; heavy = {{'torch', 'triton'}} & set(sys.modules); assert not heavy, heavy"
    run(sys.executable, "-c", code, cwd=tmp_path, paths=paths)
    arguments = ["-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}", "-v"]
    if not os.environ.get("PEGBOARD_FULL"):  # the fresh environment below runs everything
        arguments += ["-k", SLOW]
    tests = [str(path / "tests") for path in paths]
    out = run(sys.executable, "-m", "pytest", *arguments, *tests, cwd=tmp_path, paths=paths)
    for name in names:
        assert len(re.findall(rf"tests/test_{name}\.py::.* PASSED", out)) > 30, name
        assert re.search(rf"tests/test_{name}\.py::test_an_engine_uses_it PASSED", out), name


@pytest.mark.supports("Plugins", "a new plugin of any of seven roles from a template: installs, passes its tests")
@pytest.mark.full
def test_it_installs_and_passes_in_a_fresh_environment(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["-c", str(ROOT / "constraints.txt")]
    # From a wheel, as it will be for strangers: the templates must be in it
    run(*pip[:3], "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT), cwd=tmp_path, timeout=1200)
    run(*pip, str(next(tmp_path.glob("pegboard-*.whl"))), "pytest", "hypothesis", cwd=tmp_path, timeout=1800)
    for role in TEMPLATE_ROLES:
        name = f"fresh-{role}".replace("_", "-")
        run(str(venv / "bin/pegboard"), "plugins", "new", role, name, cwd=tmp_path)
        folder = tmp_path / name
        run(*pip, "-e", ".", cwd=folder, timeout=600)
        out = run(str(venv / "bin/pytest"), "-q", cwd=folder, timeout=600)
        assert "passed" in out
        assert "failed" not in out
        checked = run(str(venv / "bin/pegboard"), "plugins", "check", name, cwd=tmp_path)
        assert checked.startswith(f"ok    {role} {name}  [{name}, {name}]")


@pytest.mark.parametrize("role", TEMPLATE_ROLES)
def test_it_is_a_whole_distribution(role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "new", role, "Two_Words", "--into", str(tmp_path / "made" / "here"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    folder = tmp_path / "made" / "here" / "two-words"
    assert told["folder"] == str(folder)
    assert (told["name"], told["package"]) == ("two-words", "two_words")
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert set(told["files"]) == files
    expected = {"pyproject.toml", "README.md", ".gitignore", ".github/workflows/tests.yml", "tests/test_two_words.py"}
    assert expected | {"two_words/__init__.py", "two_words/options.py", "two_words/py.typed"} <= files
    texts = "".join((folder / file).read_text() for file in files)
    assert not re.search(r"my[-_]part|MyPart", texts)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pegboard"] == {"two-words": "two_words"}
    steps = yaml.safe_load((folder / ".github/workflows/tests.yml").read_text())["jobs"]["tests"]["steps"]
    assert {"pytest", "pip install -e '.[test]'"} <= {step.get("run") for step in steps}
    for file in files:
        if file.endswith(".py"):
            compile((folder / file).read_text(), file, "exec")


@pytest.mark.parametrize("role", TEMPLATE_ROLES)
def test_templates_import_only_what_is_public(role: str) -> None:
    """As docs/plugins.md lists it, and nothing that begins with an underscore."""
    guide = (ROOT / "docs" / "plugins.md").read_text()
    listed = guide[guide.index("What you may import:") :].partition("\n\n")[0]
    public = set(re.findall(r"`(pegboard(?:\.\w+)?)`", listed))
    assert len(public) > 5
    root = Path(pegboard.scaffold.__file__).parent / "templates" / role
    for file in root.rglob("*.py"):
        for module in re.findall(r"^\s*(?:from|import) (pegboard[\w.]*)", file.read_text(), re.MULTILINE):
            assert ".".join(module.split(".")[:2]) in public, f"{file}: {module}"
        assert not re.search(r"^\s*from pegboard[\w.]* import .*\b_\w+", file.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("role", "name", "said"),
    [
        ("schedular", "fine", "no such role; did you mean 'scheduler'?; templates: attention, cache"),
        ("observer", "fine", "it has no template, see docs/plugins.md"),
        ("cache", "-lead", "PEP 508"),
        ("cache", "two words", "PEP 508"),
        ("cache", "../up", "PEP 508"),
        ("cache", "übung", "PEP 508"),
        ("cache", "", "PEP 508"),
        ("cache", "2fast", "can't begin with a digit"),
        ("cache", "class", "a keyword"),
        ("cache", "Heapq", "the standard library has a module of that name"),
        ("cache", "torch", "can be imported here already"),
        ("cache", "pegboard-cache", "can be imported here already"),
        ("cache", "auto", "taken"),
        ("cache", "tests", "taken"),
    ],
)
def test_what_cannot_work_is_refused(role: str, name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        new_plugin(role, name, tmp_path)
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept.txt").write_text("kept")
    assert main(["plugins", "new", "cache", "mine", "--into", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["kept.txt"]


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PluginError, match="can't be written"):
        new_plugin("cache", "mine", tmp_path / "file")
