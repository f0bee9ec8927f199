from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from pegboard.config import EngineConfig, PartChoice, PluginsConfig, check_config, config_schema, load_config
from pegboard.contracts.part import OBJECTIVES, ROLES, Part
from pegboard.errors import ConfigError
from pegboard.registry.hookspecs import hookimpl
from pegboard.registry.registry import Registry


def reasons(source: Any, overrides: Any = ()) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value.reasons


FILES = {
    "c.toml": 'model = "m"\ncache = "paged"\nkv_memory = "2GiB"\n[scheduler]\nuse = "static"\noptions = { size = 4 }\n',
    "c.yaml": "model: m\ncache: paged\nkv_memory: 2GiB\nscheduler: {use: static, options: {size: 4}}\n",
    "c.YML": "model: m\ncache: paged\nkv_memory: 2GiB\nscheduler:\n  use: static\n  options:\n    size: 4\n",
    "c.json": '{"model": "m", "cache": "paged", "kv_memory": "2GiB",'
    ' "scheduler": {"use": "static", "options": {"size": 4}}}',
}


@pytest.mark.parametrize("name", FILES)
def test_all_formats_say_the_same(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    expected = EngineConfig(
        model="m",
        cache=PartChoice(use="paged"),
        kv_memory="2GiB",
        scheduler=PartChoice(use="static", options={"size": 4}),
    )
    assert load_config(tmp_path / name) == expected
    assert load_config(str(tmp_path / name)) == expected


def test_defaults() -> None:
    config = load_config({"model": "m"})
    assert (config.device, config.dtype, config.objective, config.kv_memory) == ("auto", "auto", "throughput", "auto")
    assert (config.page_size, config.max_rows, config.max_step_tokens, config.max_queue) == ("auto", 64, "auto", 1024)
    assert (config.run_ahead, config.stream_buffer, config.batch_invariant) == ("auto", 256, False)
    assert config.max_length is config.threads is config.decode_attention is config.speculator is None
    assert config.cache == PartChoice(use="auto", options={})
    assert config.observers == ()
    assert config.plugins == PluginsConfig(allow=())


def test_a_config_goes_through_json_and_back() -> None:
    config = load_config({"model": "m", "observers": ["a", {"use": "b"}], "plugins": {"allow": ["x"]}, "run_ahead": 2})
    assert load_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert load_config(config) is config


def test_a_config_is_frozen_and_keeps_nothing_of_the_caller() -> None:
    options = {"nested": {"a": 1}}
    config = load_config({"model": "m", "cache": {"options": options}})
    options["nested"]["a"] = 2
    assert config.cache.options == {"nested": {"a": 1}}
    with pytest.raises(ValidationError):
        config.page_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.toml", 'model = "m"\nmodel = "n"\n', "malformed"),
        ("c.yaml", "model: m\nmodel: n\n", "'model' is given twice"),
        ("c.yaml", "model: m\ncache: {use: a, use: b}\n", "'use' is given twice"),
        ("c.json", '{"model": "m", "cache": {"use": "a", "use": "b"}}', "'use' is given twice"),
        ("c.yaml", "- model\n", "must hold a mapping at the top, not list"),
        ("c.yaml", "", "must hold a mapping at the top, not NoneType"),
        ("c.json", '"model"', "must hold a mapping at the top, not str"),
        ("c.yaml", "model: m\non: 1\n", "key 'on' is not a string"),
        ("c.yaml", "model: !!python/object:os.system {}\n", "malformed"),
        ("c.yaml", "model: [\n", "malformed"),
        ("c.json", "{", "malformed"),
        ("c.toml", "model =", "malformed"),
        ("c.ini", "model=m", r"unknown suffix '\.ini'; use one of \.toml, \.yaml"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_missing_file_a_folder_and_bad_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe9"')
    for name in ("missing.toml", "d.toml", "latin.toml"):
        with pytest.raises(ConfigError, match=name):
            load_config(tmp_path / name)


def test_every_problem_is_told_at_once_with_path_and_nearest_key() -> None:
    found = reasons(
        {
            "page_sise": 16,
            "device": "gpu",
            "dtype": "float8",
            "page_size": 24,
            "max_rows": 0,
            "max_queue": "many",
            "batch_invariant": 1,
            "kv_memory": "2 apples",
            "run_ahead": 5,
            "cache": {"use": "paged", "option": {}},
            "sampler": 3,
            "observers": [{"use": "a", "usee": 1}, "auto"],
            "plugins": {"alow": []},
        },
        ["no_equals", "device.x=1"],
    )
    text = "\n".join(found)
    for expected in (
        "model: required, but not given",
        "page_sise: unknown key; did you mean 'page_size'?",
        "device: must be auto, cpu, cuda or cuda:N, got 'gpu'",
        "dtype: input should be 'auto', 'float32'",
        "page_size: must be auto, or a power of two and at least 16, got 24",
        "max_rows: input should be greater than or equal to 1, got 0",
        "max_queue: input should be a valid integer, got 'many'",
        "batch_invariant: input should be a valid boolean, got 1",
        "kv_memory: must be auto, a positive number of bytes, an amount such as 2GiB, or a share such as 40%",
        "run_ahead: must be auto or 0 to 4, got 5",
        "cache.option: unknown key; did you mean 'options'?",
        "sampler: ",
        "observers[0].usee: unknown key; did you mean 'use'?",
        "observers[1]: observers must be named",
        "plugins.alow: unknown key; did you mean 'allow'?",
        "override 'no_equals': must have the form key=value",
        "override 'device.x': device is 'gpu', which holds no keys",
    ):
        assert expected in text
    assert len(found) == 17


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices(device: str) -> None:
    assert load_config({"model": "m", "device": device}).device == device


@pytest.mark.parametrize("device", ["", "cuda:", "cuda:-1", "cpu:0", "CUDA", "cuda:0\n"])
def test_wrong_devices(device: str) -> None:
    assert "device: must be" in reasons({"model": "m", "device": device})[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (123, 123),
        ("7B", 7),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("1.5MiB", 3 * 2**19),
        ("1 GiB", 2**30),
        ("2GB", 2 * 10**9),
        ("40%", 4 * 2**31 * 40 // 100),
        ("100%", 4 * 2**31),
    ],
)
def test_kv_memory_in_bytes(given: Any, expected: int) -> None:
    assert load_config({"model": "m", "kv_memory": given}).kv_memory_bytes(4 * 2**31, auto=1) == expected


def test_automatic_kv_memory_is_what_the_memory_plan_gives() -> None:
    assert load_config({"model": "m"}).kv_memory_bytes(1000, auto=900) == 900


def test_more_kv_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_memory: 2KiB is 2048 bytes, but only 2000 are available"):
        load_config({"model": "m", "kv_memory": "2KiB"}).kv_memory_bytes(2000, auto=1)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "0%", "101%", "-1GiB", "GiB", "1gib", "0B", None, "", "1e3B"])
def test_wrong_kv_memory(wrong: Any) -> None:
    assert reasons({"model": "m", "kv_memory": wrong})[0].startswith("kv_memory: must be auto")


@pytest.mark.parametrize("wrong", [8, 0, -16, 17, 48, 16.0, "16", True])
def test_wrong_page_sizes(wrong: Any) -> None:
    assert reasons({"model": "m", "page_size": wrong})[0].startswith("page_size: ")


@pytest.mark.parametrize("right", [16, 32, 1024])
def test_page_sizes(right: int) -> None:
    assert load_config({"model": "m", "page_size": right}).page_size == right


@pytest.mark.parametrize("wrong", [-1, 5, True, 1.0, "2", None])
def test_wrong_run_ahead(wrong: Any) -> None:
    assert reasons({"model": "m", "run_ahead": wrong})[0].startswith("run_ahead: must be auto or 0 to 4")


def test_the_model_may_be_a_path(tmp_path: Path) -> None:
    assert load_config({"model": tmp_path}).model == str(tmp_path)
    assert reasons({"model": ""})[0].startswith("model: ")


def test_overrides_are_read_as_toml_values_or_texts() -> None:
    config = load_config(
        {"model": "m", "cache": "paged", "observers": ["log"]},
        [
            "cache.options.eviction=lru",
            "cache.options.deep.depth = 3",
            'sampler.options.name="7"',
            "sampler.options.list=[1, 2.5, true]",
            "sampler.options.date=2024-01-01",
            "sampler.options.equals=a=b",
            "sampler.options.lines=1\nx = 2",
            "kv_memory=2GiB",
            "max_rows=1_000",
            "batch_invariant=true",
            "observers.0.options.level=info",
            "scheduler=static",
            "speculator=null",
        ],
    )
    assert load_config({"model": "m", "speculator": "ngram"}, ["speculator=null"]).speculator is None
    assert config.cache == PartChoice(use="paged", options={"eviction": "lru", "deep": {"depth": 3}})
    assert config.sampler.options == {
        "name": "7",
        "list": [1, 2.5, True],
        "date": "2024-01-01",
        "equals": "a=b",
        "lines": "1\nx = 2",
    }
    assert (config.kv_memory, config.max_rows, config.batch_invariant) == ("2GiB", 1000, True)
    assert config.observers == (PartChoice(use="log", options={"level": "info"}),)
    assert config.scheduler.use == "static"


def test_overrides_as_a_mapping_keep_their_types() -> None:
    base = load_config({"model": "m", "cache": {"use": "paged", "options": {"a": 1}}})
    config = load_config(base, {"cache.options.b": "2", "max_rows": 3, "speculator": {"use": "ngram"}})
    assert config.cache.options == {"a": 1, "b": "2"}
    assert config.max_rows == 3
    assert config.speculator == PartChoice(use="ngram")
    assert base.cache.options == {"a": 1}


@pytest.mark.parametrize(
    "wrong", ["=1", ".a=1", "cache..use=1", "observers.3.use=x", "observers.x=1", "max_rows.a=1", "dtype.a=1"]
)
def test_overrides_that_lead_nowhere(wrong: str) -> None:
    assert reasons({"model": "m", "observers": ["a"], "max_rows": 4, "dtype": "auto"}, [wrong])[0].startswith(
        "override "
    )


def test_choices_name_every_part_that_the_config_chooses() -> None:
    plain = load_config({"model": "m"}).choices()
    assert {where for where, _, _ in plain} == {
        "attention", "cache", "scheduler", "sampler", "quantizer", "ops", "executor"
    }  # fmt: skip
    lists = {"observers": ["z"], "logits_processors": ["p"]}
    full = load_config({"model": "m", "decode_attention": "x", "speculator": "y", **lists}).choices()
    assert [(where, role) for where, role, _ in full if where not in {w for w, _, _ in plain}] == [
        ("decode_attention", "attention"),
        ("speculator", "speculator"),
        ("observers[0]", "observer"),
        ("logits_processors[0]", "logits_processor"),
    ]
    assert {role for _, role, _ in full} | {"model", "checkpoint"} == set(ROLES)


def test_the_objectives_are_those_of_the_contracts() -> None:
    assert get_args(EngineConfig.model_fields["objective"].annotation) == OBJECTIVES


def test_the_schema_admits_what_the_config_admits() -> None:
    schema = json.loads(json.dumps(config_schema()))
    assert schema["required"] == ["model"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(EngineConfig.model_fields)
    assert {option["type"] for option in schema["$defs"]["PartChoice"]["anyOf"] if "type" in option} >= {"string"}
    assert schema["properties"]["kv_memory"]["anyOf"][0] == {"type": "integer", "minimum": 1}


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    page_size: int = 16


class Plugin:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [
            Part(role="cache", name="mine", factory="not_installed:X", options=Options, summary=""),
            Part(role="attention", name="gpu", factory="not_installed:X", devices=("cuda",), summary=""),
            Part(role="ops", name="needy", factory="not_installed:X", requires=("not_installed",), summary=""),
            Part(role="observer", name="log", factory="not_installed:X", options=Options, summary=""),
        ]


class Broken:
    @hookimpl
    def pegboard_partz(self) -> list[Part]:
        return []


def test_check_config_passes_the_defaults_with_what_pegboard_brings() -> None:
    assert check_config(load_config({"model": "m"}), Registry.discover()) == []


def test_check_config_tells_everything_at_once() -> None:
    config = load_config(
        {
            "model": "m",
            "device": "cpu",
            "cache": {"use": "mine", "options": {"page_sise": 1}},
            "attention": "gpu",
            "ops": "needy",
            "scheduler": "continous",
            "observers": [{"use": "log", "options": {"page_size": "x"}}],
            "plugins": {"allow": ["pegbord"]},
        }
    )
    found = check_config(config, Registry.discover([Plugin(), Broken()]))
    for expected, reason in zip(
        (
            "plugin 'Broken' (an object passed to the engine) is broken: unknown hook 'pegboard_partz'",
            "plugins.allow: no installed distribution 'pegbord' offers plugins; did you mean 'pegboard'?",
            "attention = 'gpu': runs on cuda, not on cpu",
            "cache.options.page_sise: unknown key; did you mean 'page_size'?",
            "scheduler = 'continous': no scheduler named 'continous'; did you mean 'continuous'?",
            "ops = 'needy': needs not_installed",
            "observers[0].options.page_size: input should be a valid integer",
        ),
        found,
        strict=True,
    ):
        assert expected in reason
