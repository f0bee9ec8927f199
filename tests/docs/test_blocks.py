"""What the guides show, works: Python runs and prints what is said, configs load, commands exist and answer so."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer

from pegboard import load_config
from pegboard.cli.main import app, main

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "toml", "yaml", "json", "console", "text"}
DIRECTIVES = {"file", "config", "continues", "output", "needs", "not run"}


def test_every_block_says_what_it_is(block: Any) -> None:
    assert block.language in LANGUAGES, f"{block.label}: language {block.language!r}"
    unknown = block.directives.keys() - DIRECTIVES
    assert not unknown, f"{block.label}: unknown directive {unknown}"
    assert block.directives.get("needs", "model") == "model"
    assert block.directives.get("not run", "why"), f"{block.label}: say why it is not run"
    if block.language in ("toml", "yaml", "json"):
        assert {"file", "config"} & block.directives.keys(), f"{block.label}: is it a file or a config?"


def test_python_runs_and_prints_what_is_said(script: Any, enter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(script[0].page)
    module = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # pydantic and msgspec look annotations up there
    printed = ""
    for block in script:
        if block.language == "python":
            # Line numbers in a traceback are those of the page.
            code = compile("\n" * block.line + block.text, str(block.page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, module.__dict__)
            printed = out.getvalue()
        else:
            assert _agrees(block.text, printed), f"{block.label} was in truth:\n{printed}"


def test_config_loads(config_block: Any, tmp_path: Path) -> None:
    file = tmp_path / f"engine.{config_block.language}"
    file.write_text(config_block.text)
    load_config(file)


def test_commands_exist(console: Any) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command, _ in _sessions(console.text):
        program, *arguments = shlex.split(command)
        if program == "pegboard":
            _parse(arguments)
        elif program == "make":
            assert set(arguments) <= set(targets), f"{console.label}: {command}"


def test_commands_answer_as_shown(console: Any, enter: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if "not run" in console.directives:
        pytest.skip(console.directives["not run"])
    enter(console.page)
    for command, shown in _sessions(console.text):
        program, *arguments = shlex.split(command)
        if program != "pegboard":
            continue
        main(arguments)
        answer = capsys.readouterr()
        assert _agrees(shown, answer.err + answer.out), f"{console.label}: {command}\n{answer.err}{answer.out}"


def _sessions(text: str) -> list[tuple[str, str]]:
    """(command, answer) of each line that begins with "$ "; a backslash continues the line."""
    found: list[tuple[str, str]] = []
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        else:
            assert found, f"{line!r} comes before any command"
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def _agrees(shown: str, answer: str) -> bool:
    """`...` stands for anything: whole lines on a line of its own, else a part of one. Columns may be wider."""
    pattern = ""
    for line in _narrow(shown):
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += r"[^\n]*".join(re.escape(part) for part in line.split("...")) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _narrow(answer))) is not None


def _narrow(text: str) -> list[str]:
    return [re.sub(r"(?<=\S) +", " ", line).rstrip() for line in text.strip().splitlines()]


def _parse(arguments: list[str]) -> None:
    """Hold a command line against the real commands, without running it: raises for what does not exist."""
    with contextlib.suppress(typer.Exit):  # --version
        context = typer.main.get_command(app).make_context("pegboard", list(arguments))
        while hasattr(context.command, "get_command"):
            name, *arguments = arguments
            command = context.command.get_command(context, name)
            assert command is not None, f"there is no command {name!r}"
            context = command.make_context(name, list(arguments), parent=context)
