"""`pegboard config`: whether a config can work, what it says in full, and what may be said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import yaml

from ..config import check_config, config_schema, load_config
from ..errors import ConfigError
from ..registry.registry import Registry
from .engine_options import ModelOption, read_options
from .output import AsJson, emit

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Check and show configs, and their schema.")

File = Annotated[Path, typer.Argument(help="A TOML, YAML or JSON file.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="key=value, with a dotted key; may be repeated.")]


@app.command()
def check(file: File, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Whether the config is valid and its plugins can do what it asks. Loads no model."""
    config = load_config(file, overrides or ())
    reasons = check_config(config, Registry.discover())
    if reasons:
        raise ConfigError(f"config {file} can't work", reasons)
    emit({"ok": True}, f"{file}: ok", as_json=as_json)


@app.command()
def show(file: File, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """The config with every default filled in, as YAML."""
    data = load_config(file, overrides or ()).model_dump(mode="json")
    emit(data, yaml.safe_dump(data, sort_keys=False, allow_unicode=True).rstrip(), as_json=as_json)


@app.command()
def plan(
    file: Annotated[Path | None, typer.Argument(help="A TOML, YAML or JSON file.")] = None,
    model: ModelOption = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """The parts that an engine of this config would have and the memory that it needs. Loads no weights."""
    from ..assembly import plan_engine

    made = plan_engine(config=read_options(model, file, overrides))
    parts = [f"{where}: {part.name}" for where, part in made.parts.items()]
    facts = [
        f"device: {made.device.type} ({made.device.name}), {made.dtype}",
        f"max_length: {made.max_length} tokens; the longest sequence that the cache holds: {made.capacity}",
        f"memory: {made.memory.text()}",
    ]
    emit(msgspec.to_builtins(made), "\n".join([*parts, *facts]), as_json=as_json)


@app.command()
def schema(
    role: Annotated[str | None, typer.Option(help="With --name: the options of one part.")] = None,
    name: Annotated[str | None, typer.Option(help="The part's name.")] = None,
    as_json: AsJson = False,
) -> None:
    """The JSON schema of a config, or of one part's options."""
    if (role is None) != (name is None):
        raise ConfigError("--role and --name go together")
    if role is None or name is None:
        found = config_schema()
    else:
        model = Registry.discover().get(role, name).options_model()
        if model is None:
            raise ConfigError(f"{role} {name!r} takes no options")
        found = model.model_json_schema()
    emit(found, json.dumps(found, indent=2, ensure_ascii=False), as_json=as_json)
