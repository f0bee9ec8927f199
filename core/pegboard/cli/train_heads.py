"""`pegboard train-heads`: heads that draft for a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from .output import AsJson, emit


def train_heads(
    target: Annotated[str, typer.Argument(help="The model to draft for: a file, a folder, or a name.")],
    kind: Annotated[str, typer.Option("--kind", help="The speculator part that will load them: medusa, eagle.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts, one a line, that the target answers; else built-in ones.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="A text that the target reads, instead.")] = None,
    drafts: Annotated[int, typer.Option("--drafts", min=1, max=62, help="Drafts a row: Medusa's heads.")] = 3,
    texts: Annotated[
        int, typer.Option("--texts", min=1, help="Answers to learn from, or pieces of the text at most.")
    ] = 256,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of an answer at most.")] = 96,
    length: Annotated[int, typer.Option("--length", min=8, help="Tokens of a piece of the text.")] = 256,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How often each is learnt from.")] = 8,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts a step.")] = 8,
    rate: Annotated[float, typer.Option("--rate", min=0.0, help="AdamW's greatest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option("--seed", help="Of texts, first weights and order.")] = 0,
    device: Annotated[str, typer.Option("--device", help="Where it all runs: cpu, cuda, auto.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a speculator's heads on their target's own texts; acceptance on held-out prompts before and after."""
    from ..heads import HeadsSettings
    from ..heads import train_heads as run

    report = run(
        target,
        out,
        kind=kind,
        prompts=prompts,
        text=text,
        settings=HeadsSettings(
            drafts=drafts,
            texts=texts,
            tokens=tokens,
            length=length,
            epochs=epochs,
            batch=batch,
            rate=rate,
            seed=seed,
        ),
        device=device,
        say=lambda line: print(line, file=sys.stderr),
    )
    lines = [f"{report.parameters / 1e6:.2f} M parameters, {report.bytes_written / 1e6:.2f} MB in {out}"]
    for word, found in (("before", report.before), ("after", report.after)):
        shares = ", ".join(f"{share:.0%}" for share in found.by_place) or "none"
        lines.append(f"{word}: {found.mean_length:.2f} tokens a step; drafts accepted by place: {shares}")
    emit(msgspec.to_builtins(report), "\n".join(lines), as_json=as_json)
