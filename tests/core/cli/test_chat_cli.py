"""`pegboard chat`: what is typed, and what comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.cli.main import main
from pegboard.testing.tiny import tiny_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    import json

    folder = tiny_model(tmp_path / "m", vocab_size=300, max_position_embeddings=96)
    config = folder / "tokenizer_config.json"
    told = json.loads(config.read_text()) if config.exists() else {}
    told["chat_template"] = "{% for m in messages %}{{ m.content }} {% endfor %}"
    config.write_text(json.dumps(told))
    return folder


def test_commands_and_a_full_context(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["/help", "hello", "x" * 90, "/clear", "hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    assert main(["chat", "-m", str(path), "--max-tokens", "8", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert "there is no /help; Type a message." in shown.err
    assert shown.err.count("; /clear forgets what was said") == 1
    first, second = (line for line in shown.out.split("\n") if line)
    assert first == second, "nothing of the first conversation is left"
