"""`pegboard tune`: a table of the fastest kernels on this device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from .engine_options import ConfigOption, ModelOption, SetOption, read_options
from .output import AsJson, emit


def tune(
    out: Annotated[Path, typer.Argument(help="The table's file, JSON.")],
    model: ModelOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    rows: Annotated[
        list[int] | None,
        typer.Option("--rows", min=1, help="Rows of a product; may be repeated. Else those that matter."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the ways in which the quantizer's kernels can run for a model's shapes, and write down the fastest."""
    from ..tuning import tune as run

    asked = read_options(model, config, overrides)
    report = run(asked, out, rows=rows, say=lambda line: print(line, file=sys.stderr))
    pairs = [(one.microseconds, one.microseconds_before) for one in report.found if one.microseconds_before is not None]
    gained = sum(before for _, before in pairs) / sum(now for now, _ in pairs) - 1 if pairs else 0.0
    line = f"{len(report.found)} products of {report.quantizer} on {report.device}, {gained:.1%} faster in all: {out}"
    emit(msgspec.to_builtins(report), line, as_json=as_json)
