"""What every command prints: text for people, or one JSON value."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from ..errors import PegboardError

#: The option that every command has.
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]


def emit(data: Any, text: str, *, as_json: bool) -> None:
    """Print `data` as JSON or `text`, on standard output."""
    print(json.dumps(data, indent=2, ensure_ascii=False) if as_json else text)


def emit_error(error: PegboardError, *, as_json: bool) -> None:
    """{"error": {"type", "message", "reasons"}} on standard output, or one message on standard error."""
    if as_json:
        detail = {
            "type": type(error).__name__,
            "message": str(error),
            "reasons": list(getattr(error, "reasons", ())),
        }
        emit({"error": detail}, "", as_json=True)
    else:
        print(f"error: {error}", file=sys.stderr)
