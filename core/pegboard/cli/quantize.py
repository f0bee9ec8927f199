"""`pegboard quantize`: a checkpoint of fewer bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from .output import AsJson, emit


def quantize(
    model: Annotated[str, typer.Argument(help="A file, a folder, or a name; dense or GGUF.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    scheme: Annotated[str, typer.Option("--scheme", help="The quantizer part that writes: int4, int8.")] = "int4",
    method: Annotated[str, typer.Option("--method", help="rtn, awq or gptq; the latter two calibrate.")] = "rtn",
    group: Annotated[
        int | None, typer.Option("--group", help="Columns that share a scale: 32, 64, 128, or -1 for all.")
    ] = None,
    symmetric: Annotated[
        bool | None, typer.Option("--symmetric/--asymmetric", help="Without zero points, or with them.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", help="A module that stays dense, as the head does; may be repeated.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="A text; its last fifth measures the perplexity.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Texts to calibrate with, and to measure.")] = 16,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of each.")] = 512,
    device: Annotated[str, typer.Option("--device", help="Where the model is run: cpu, cuda, auto.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write a model's linears in fewer bits, as a safetensors folder; perplexity before and after."""
    from ..quantizing import quantize as run

    named = {"group": group, "symmetric": symmetric, "skip": skip and ["lm_head", *skip]}
    report = run(
        model,
        out,
        scheme=scheme,
        method=method,
        options={name: value for name, value in named.items() if value is not None},
        calibration=calibration,
        samples=samples,
        length=length,
        device=device,
        say=lambda text: print(text, file=sys.stderr),
    )
    lines = [
        f"{report.quantized} linears in {report.scheme} ({report.method}): "
        f"{report.bytes_before / 1e6:.1f} MB before, {report.bytes_after / 1e6:.1f} MB after"
    ]
    if report.perplexity_before is not None and report.perplexity_after is not None:
        share = report.perplexity_after / report.perplexity_before - 1
        lines.append(
            f"perplexity {report.perplexity_before:.3f} before, {report.perplexity_after:.3f} after ({share:+.2%}), "
            f"{report.held_out_tokens} tokens held out of {calibration}"
        )
    emit(msgspec.to_builtins(report), "\n".join(lines), as_json=as_json)
