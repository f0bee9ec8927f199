"""Errors of every kind: one object on standard output with --json, text on standard error without; exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pegboard.cli.main import main

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "--prompt"),
        (["generate", "-p", "x", "--no-such-option"], "--no-such-option"),
        (["generate", "-p", "x", "--max-tokens", "many"], "--max-tokens"),
        (["compare", "--max-tokens", "0"], "--max-tokens"),
        (["plugins", "list", "one"], "one"),
        (["config", "check"], "argument"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: Output) -> None:
    assert main([*arguments, "--json"]) == 2
    answer = capsys.readouterr()
    detail = json.loads(answer.out)["error"]
    assert detail["type"] == "UsageError"
    assert message in detail["message"]
    assert detail["reasons"] == []
    assert answer.err == ""
    assert main(arguments) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert "Usage" in answer.err


def test_errors_of_pegboard(capsys: Output, tmp_path: Path) -> None:
    arguments = ["generate", "-p", "x", "-m", str(tmp_path / "missing")]
    assert main([*arguments, "--json"]) == 2
    answer = capsys.readouterr()
    assert json.loads(answer.out)["error"]["type"] in ("CheckpointError", "ConfigError")
    assert answer.err == ""
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_what_is_fine_stays_so(capsys: Output) -> None:
    assert main(["plugins", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]
    assert main(["generate", "--help", "--json"]) == 0
    assert "--prompt" in capsys.readouterr().out
