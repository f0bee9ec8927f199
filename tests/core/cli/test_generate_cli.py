"""`pegboard generate`: what is asked for and how it is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.cli.main import main
from pegboard.testing.tiny import tiny_model

Output = pytest.CaptureFixture[str]
COMMON = ["--set", "device=cpu", "--seed", "3", "--max-tokens", "5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("cli") / "model", vocab_size=300)


def expected(model: Path, prompt: Any, **sampling: Any) -> Any:
    with Engine(model, device="cpu") as engine:
        return engine.generate([prompt], SamplingParams(seed=3, max_tokens=5, **sampling))[0].raise_for_error()


def test_several_texts(model: Path, capsys: Output) -> None:
    arguments = ["generate", "-m", str(model), "-p", "one", "-n", "3", *COMMON]
    found = expected(model, "one", n=3)
    assert main(arguments) == 0
    texts = [completion.text for completion in found.completions]
    assert len(set(texts)) == 3
    printed = capsys.readouterr().out
    assert printed == "".join(f"--- {place} of 3\n{text}\n" for place, text in enumerate(texts, start=1))
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["text"] == texts[0]
    assert [one["text"] for one in told["completions"]] == texts
    assert "score" not in told
    assert main([*arguments, "--best-of", "4", "--json"]) == 0
    scores = [one["score"] for one in json.loads(capsys.readouterr().out)["completions"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_log_probabilities(model: Path, capsys: Output) -> None:
    arguments = ["generate", "-m", str(model), "-p", "one", "--logprobs", "2", *COMMON]
    assert main(arguments) == 2
    assert "--logprobs needs --json" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    [completion] = expected(model, "one", logprobs=2).completions
    assert "completions" not in told
    assert [one["token_id"] for one in told["logprobs"]] == told["token_ids"]
    assert [one["logprob"] for one in told["logprobs"]] == pytest.approx([one.logprob for one in completion.logprobs])
    assert {len(one["top"]) for one in told["logprobs"]} == {2}


def test_prompts_of_ids(model: Path, tmp_path: Path, capsys: Output) -> None:
    ids = ["--ids", "5,6,7", "--ids", "[9]"]
    assert main(["generate", "-m", str(model), "-p", "one", *ids, *COMMON, "--json"]) == 0
    lines = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    assert lines == [list(expected(model, prompt).token_ids) for prompt in ("one", [5, 6, 7], [9])]
    bare = tiny_model(tmp_path / "bare", tokenizer=False)
    assert main(["generate", "-m", str(bare), *ids[:2], *COMMON]) == 0
    assert capsys.readouterr().out.strip() == ",".join(map(str, expected(bare, [5, 6, 7]).token_ids))
    assert main(["generate", "-m", str(model), "--chat", *ids]) == 2
    assert "--chat puts texts into a template" in capsys.readouterr().err
    assert main(["generate", "-m", str(model), "--ids", "a,b"]) == 2
    assert "write e.g. 1,17,42" in capsys.readouterr().err


def test_a_config_file_with_mistakes_is_named(model: Path, tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(f'model = "{model}"\nmax_row = 3\nrun_ahead = "far"\n', encoding="utf-8")
    assert main(["generate", "-c", str(file), "-p", "x"]) == 2
    told = capsys.readouterr().err
    assert f"config {file} is not valid" in told
    assert "max_row" in told
    assert "run_ahead" in told
    assert main(["plugins", "explain", "-m", str(model), "--role", "speculator"]) == 0
    assert "speculator: none is asked for; there are draft_model, eagle, medusa, ngram" in capsys.readouterr().out
