from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.cli.main import main

MANIFEST = """
from pegboard import Part, hookimpl

@hookimpl
def pegboard_parts():
    return [
        Part(role="observer", name="quiet", factory="cli_fake:Quiet", summary="Says nothing", options="cli_fake:Lax"),
        Part(role="observer", name="misspelt", factory="cli_fake:Misspelt", summary="Hears nothing"),
        Part(role="cache", name="half", factory="cli_fake:Half", summary="Half a cache"),
    ]

class Quiet:
    @classmethod
    def refusals(cls, need, options):
        return []

    @classmethod
    def create(cls, need, options):
        return cls()

class Misspelt(Quiet):
    @hookimpl
    def pegboard_step_don(self, event):
        pass

from pydantic import BaseModel

class Lax(BaseModel):
    pass

from pegboard.contracts.cache import CacheManager

class Half(CacheManager):
    @classmethod
    def refusals(cls, need, options):
        return []

    @classmethod
    def create(cls, need, options):
        return cls()
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with two distributions: one with faulty parts, one that can't be imported."""
    for distribution, module, text in (("cli-fake", "cli_fake", MANIFEST), ("cli-broken", "cli_broken", "1 / 0")):
        info = tmp_path / f"{module}-3.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.0\n")
        (info / "entry_points.txt").write_text(f"[pegboard]\n{module} = {module}\n")
        (tmp_path / f"{module}.py").write_text(text)
    return tmp_path


def pegboard(*arguments: str, path: Path | None = None, after: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, then the code in `after`."""
    code = f"import sys\nfrom pegboard.cli.main import main\ncode = main(sys.argv[1:])\n{after}\nsys.exit(code)"
    paths = [str(path or ""), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


NO_TORCH = "heavy = {'torch', 'triton', 'transformers', 'numpy'} & sys.modules.keys()\nassert not heavy, heavy"


@pytest.mark.parametrize(
    "arguments",
    [("plugins", "list"), ("plugins", "list", "--json"), ("plugins", "explain"), ("--help",), ("config", "schema")],
)
def test_light_commands_import_no_torch(arguments: tuple[str, ...]) -> None:
    done = pegboard(*arguments, after=NO_TORCH)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_import_pegboard_is_light() -> None:
    heavy = {"torch", "triton", "pluggy", "pydantic"}
    code = f"import sys, pegboard\nfound = {heavy} & sys.modules.keys()\nassert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_list_shows_parts_and_broken_plugins(site: Path) -> None:
    done = pegboard("plugins", "list", path=site)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "quiet" in line)
    assert row.split() == ["observer", "quiet", "cli-fake", "3.0", "1", "Says", "nothing"]
    assert "BROKEN plugin 'cli_broken' of distribution cli-broken 3.0: ZeroDivisionError" in done.stdout


def test_list_as_json(site: Path) -> None:
    data = json.loads(pegboard("plugins", "list", "--json", path=site).stdout)
    (quiet,) = [part for part in data["parts"] if part["name"] == "quiet"]
    assert quiet["role"] == "observer"
    assert (quiet["distribution"], quiet["version"], quiet["contract"]) == ("cli-fake", "3.0", 1)
    (broken,) = data["broken"]
    assert broken["distribution"] == "cli-broken"
    assert "1 / 0" in broken["traceback"]


def test_explain_says_what_is_not_allowed(site: Path, tmp_path: Path) -> None:
    data = json.loads(pegboard("plugins", "explain", "--role", "cache", "--json", path=site).stdout)
    (decision,) = data["decisions"]
    assert data["static"] is True
    assert decision["winner"] == "paged"
    assert {c["name"]: c["verdict"] for c in decision["candidates"]} == {"paged": "chosen", "half": "not allowed"}
    config = tmp_path / "c.toml"
    config.write_text('cache = "half"\n[plugins]\nallow = ["cli-fake"]\n')
    named = json.loads(pegboard("plugins", "explain", str(config), "--role", "cache", "--json", path=site).stdout)
    assert named["decisions"][0]["winner"] == "half"


def test_a_model_without_a_config(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["-m", str(tiny_path), "--set", "device=cpu", "--set", "scheduler=static", "--json"]
    assert main(["plugins", "explain", "--role", "scheduler", *given]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert not explained["static"]
    assert [decision["winner"] for decision in explained["decisions"]] == ["static"]
    assert main(["config", "plan", *given]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["scheduler"]["name"] == "static"


def test_explain_of_a_model_that_is_missing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'model = "{tmp_path / "missing.gguf"}"\n')
    assert main(["plugins", "explain", str(config), "--json"]) == 2
    assert "missing.gguf" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_check_finds_what_a_part_lacks(site: Path) -> None:
    done = pegboard("plugins", "check", "cli-fake", "--json", path=site)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["ok"] is False
    problems = {part["name"]: "\n".join(part["problems"]) for part in data["parts"]}
    assert set(problems) == {"quiet", "half", "misspelt"}
    assert "unknown hook 'pegboard_step_don'; did you mean 'pegboard_step_done'?" in problems["misspelt"]
    assert 'must be declared with extra="forbid"' in problems["quiet"]
    assert "fork of CacheManager is not implemented" in problems["half"]


def test_check_shows_the_traceback_of_a_broken_plugin(site: Path) -> None:
    done = pegboard("plugins", "check", "cli-broken", path=site)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "Traceback (most recent call last)" in done.stdout


def test_our_own_parts_pass_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plugins", "check", "pegboard", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert {f"{part['role']} {part['name']}": part["problems"] for part in data["parts"] if part["problems"]} == {}
    assert (code, data["ok"]) == (0, True)
    assert len(data["parts"]) >= 11


@pytest.mark.parametrize("arguments", [["plugins", "check", "pegbord"], ["plugins", "explain", "--role", "cach"]])
def test_an_error_is_one_clean_line_or_one_object(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    plain = capsys.readouterr()
    assert plain.out == ""
    assert plain.err.startswith("error: ")
    assert "did you mean" in plain.err
    assert "Traceback" not in plain.err
    assert main([*arguments, "--json"]) == 2
    as_json = capsys.readouterr()
    assert as_json.err == ""
    assert json.loads(as_json.out) == {
        "error": {"type": "PluginError", "message": plain.err.removeprefix("error: ").strip(), "reasons": []}
    }


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pegboard 0.")
    assert main(["plugin"]) == 2
    assert "plugins" in capsys.readouterr().err


def test_commands_are_imported_when_they_run(tmp_path: Path) -> None:
    code = (
        "import sys, types\n"
        "made = types.ModuleType('pegboard.cli.chat')\n"
        "def chat(name: str, loud: bool = False) -> None:\n    print(name.upper() if loud else name)\n"
        "made.chat = chat\n"
        "from pegboard.cli import main\n"
        "sys.modules['pegboard.cli.chat'] = made\n"
        "assert 'pegboard.cli.plugins' not in sys.modules\n"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "chat", "hey", "--loud"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "HEY\n"
