"""`pegboard tune`: a table of the fastest kernels on this device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from .engine_options import ConfigOption, ModelOption, SetOption
from .output import AsJson, emit


def tune(
    out: Annotated[Path, typer.Argument(help="The table's file, JSON.")],
    model: ModelOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    rows: Annotated[
        list[int] | None, typer.Option("--rows", min=1, help="Rows of a product; may be repeated. Else 1, 2, 4 to 512.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the ways in which the quantizer's kernels can run for a model's shapes, and write down the fastest."""
    from ..config import load_config
    from ..config_sources import read_config
    from ..tuning import ROWS
    from ..tuning import tune as run

    values: dict[str, Any] = {} if config is None else dict(read_config(config))
    if model is not None:
        values["model"] = model
    report = run(
        load_config(values, overrides or ()), out, rows=rows or ROWS, say=lambda line: print(line, file=sys.stderr)
    )
    gained = sum(one.untuned_microseconds for one in report.found) / sum(one.microseconds for one in report.found) - 1
    line = f"{len(report.found)} products of {report.quantizer} on {report.device}, {gained:.1%} faster in all: {out}"
    emit(msgspec.to_builtins(report), line, as_json=as_json)
