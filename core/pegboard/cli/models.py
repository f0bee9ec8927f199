"""pegboard models: fetch models and find them again."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import hub
from .output import AsJson, emit

app = typer.Typer(help="List and fetch models.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A known name, a Hugging Face id (org/name), or, for `path`, a path.")]


@app.command()
def pull(name: Name, as_json: AsJson = False) -> None:
    """Fetch a model, unless it is here, and print its path."""
    # What is going on goes to standard error, so that the path can be used by a script.
    found = hub.pull(name, lambda text: print(text, file=sys.stderr))
    emit({"name": name, "path": str(found)}, str(found), as_json=as_json)


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """Show the known models and those in Hugging Face's cache."""
    entries = hub.list_models()
    width = max(len(entry.name) for entry in entries)
    lines, rows = [], []
    for entry in entries:
        path = None if entry.path is None else str(entry.path)
        where = path or f"not here; pegboard models pull {entry.name}"
        lines.append(f"{entry.name:<{width}}  {entry.nbytes / 1e6:8.1f} MB  {where}")
        rows.append({"name": entry.name, "path": path, "bytes": entry.nbytes, "source": entry.source})
    emit(rows, "\n".join(lines), as_json=as_json)


@app.command()
def path(name: Name, as_json: AsJson = False) -> None:
    """Print where a model lies on this machine; fetches nothing."""
    found = hub.resolve_model(name)
    emit({"name": name, "path": str(found)}, str(found), as_json=as_json)
