from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pegboard.cli.main import main
from pegboard.config import EngineConfig, config_schema, load_config

Output = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.toml"
    path.write_text('model = "m"\ncache = "paged"\n')
    return path


def test_a_good_config_passes(file: Path, capsys: Output) -> None:
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out.strip() == f"{file}: ok"
    assert main(["config", "check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True}


def test_every_reason_comes_at_once(file: Path, capsys: Output) -> None:
    arguments = ["config", "check", str(file), "--set", "cache=pagged", "--set", "scheduler=statik"]
    assert main(arguments) == 2
    plain = capsys.readouterr()
    assert plain.out == ""
    assert "did you mean 'paged'" in plain.err
    assert "did you mean 'static'" in plain.err
    assert main([*arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "ConfigError"
    assert len(error["reasons"]) == 2


def test_wrong_options_of_a_part_are_found(file: Path, capsys: Output) -> None:
    assert main(["config", "check", str(file), "--set", "cache.options.no_such_option=1"]) == 2
    assert "cache.options.no_such_option: unknown key" in capsys.readouterr().err


def test_an_invalid_file_is_refused(tmp_path: Path, capsys: Output) -> None:
    assert main(["config", "show", str(tmp_path / "missing.toml"), "--json"]) == 2
    assert "missing.toml" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_show_fills_defaults_and_applies_overrides(file: Path, capsys: Output) -> None:
    expected = load_config(file, ["max_rows=3"])
    assert main(["config", "show", str(file), "--set", "max_rows=3", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert main(["config", "show", str(file), "--set", "max_rows=3"]) == 0
    as_yaml = yaml.safe_load(capsys.readouterr().out)
    assert as_json == as_yaml
    assert set(as_json) == set(EngineConfig.model_fields)
    assert load_config(as_yaml) == expected


def test_schema(capsys: Output) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == config_schema()


def test_schema_of_a_parts_options(capsys: Output) -> None:
    from pegboard_cache.options import PagedOptions

    assert main(["config", "schema", "--role", "cache", "--name", "paged", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == PagedOptions.model_json_schema()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--role", "cache"], "--role and --name go together"),
        (["--role", "ops", "--name", "torch"], "takes no options"),
        (["--role", "ops", "--name", "torche"], "did you mean 'torch'"),
    ],
)
def test_schema_refusals(arguments: list[str], reason: str, capsys: Output) -> None:
    assert main(["config", "schema", *arguments]) == 2
    assert reason in capsys.readouterr().err
