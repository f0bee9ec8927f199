"""`pegboard compare`: where two configs part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..errors import ConfigError
from .engine_options import ModelOption, SetOption, Temperature, TopK, TopP, loading_bar
from .output import AsJson, emit

_Config = Annotated[Path | None, typer.Argument(help="A TOML, YAML or JSON file.")]


def compare(
    a: _Config = None,
    b: Annotated[Path | None, typer.Argument(help="Another; left out: the first again, see --with.")] = None,
    model: ModelOption = None,
    overrides: SetOption = None,
    only_b: Annotated[
        list[str] | None, typer.Option("--with", help="Override one field of the second config only.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A text; may be repeated.")] = None,
    ids: Annotated[list[str] | None, typer.Option("--ids", help="A prompt of token ids, 1,17,42.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file: one prompt a line, ids as a JSON list.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens of each prompt.")] = 16,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(help="Of the noise, with a temperature.")] = 0,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs for the speed; the best counts.")] = 2,
    positions: Annotated[
        int, typer.Option("--positions", min=1, help="Tokens of a prompt that are compared part by part.")
    ] = 256,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", min=0.0, help="Relative error; left out: by dtype.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run two configs on the same prompts: first part that differs, errors by layer, tokens, speed.

    Exits with 0 when they agree within the tolerance, with 1 when they differ."""
    from ..comparing import compare as run
    from ..comparing import read_prompts
    from ..comparing.prompts import parse_ids
    from .compare_tables import comparison_lines

    if b is None and not only_b:
        raise ConfigError("there is nothing to compare with: name a second config, or override a field with --with")
    given: list[Any] = [*(prompt or ()), *(parse_ids(text, "--ids") for text in ids or ())]
    if prompts is not None:
        given += read_prompts(prompts)
    first = _load(a, model, overrides or [])
    second = _load(a if b is None else b, model, [*(overrides or ()), *(only_b or ())])
    with loading_bar(shown=not as_json) as progress:
        found = run(
            first,
            second,
            given,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            repeats=repeats,
            positions=positions,
            tolerance=tolerance,
            progress=progress,
        )
    emit(msgspec.to_builtins(found), "\n".join(comparison_lines(found)), as_json=as_json)
    if not found.agree:
        raise typer.Exit(1)


def _load(file: Path | None, model: str | None, overrides: list[str]) -> Any:
    from ..config import load_config
    from ..config_sources import read_config

    values: dict[str, Any] = {} if file is None else dict(read_config(file))
    if model is not None:
        values["model"] = model
    return load_config(values, overrides)
