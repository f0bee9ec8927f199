"""`pegboard`: the entry point, and the list of commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import PegboardError
from .output import emit, emit_error

#: Command -> its function or sub-app, and the line that the help shows without importing it.
_COMMANDS: Final = {
    "generate": ("pegboard.cli.generate:generate", "Generate text from a prompt."),
    "chat": ("pegboard.cli.chat:chat", "Talk to a model."),
    "compare": ("pegboard.cli.compare:compare", "Where two configs part: numbers, tokens, speed."),
    "bench": ("pegboard.cli.bench:app", "Measure speed."),
    "quantize": ("pegboard.cli.quantize:quantize", "Write a checkpoint of fewer bits."),
    "tune": ("pegboard.cli.tune:tune", "Measure a quantizer's kernels on this device, for a table."),
    "train-heads": ("pegboard.cli.train_heads:train_heads", "Train heads that draft for a model."),
    "models": ("pegboard.cli.models:app", "List and fetch models."),
    "plugins": ("pegboard.cli.plugins:app", "List, explain, check, lock and start plugins."),
    "config": ("pegboard.cli.config:app", "Check and show configs, and their schema."),
}


#: What typer raises for wrong options: ClickException, of click or of the copy of it that typer brings.
_WRONG_USE: Final[Any] = typer.BadParameter.__mro__[2]


class _LazyCommand(TyperCommand):
    """Stands for a command in the help; becomes the real one when it is run."""

    def __init__(self, name: str, target: str, help: str) -> None:
        super().__init__(name, help=help)
        self._target = target

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module, _, attribute = self._target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(name=self.name)(found)
            found = single
        return typer.main.get_command(found).make_context(info_name, args, parent=parent, **extra)


class _LazyGroup(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (target, line) in _COMMANDS.items():
            self.add_command(_LazyCommand(name, target, line))


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pegboard {metadata.version('pegboard')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An LLM inference engine that you assemble from plugins."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a check that found something, 2 for an error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    try:
        # Typer prints wrong usage as text and exits; for --json it is raised instead.
        code = typer.main.get_command(app).main(args=given, prog_name="pegboard", standalone_mode=not as_json)
        return code if as_json and isinstance(code, int) else 0
    except _WRONG_USE as error:
        emit({"error": {"type": "UsageError", "message": error.format_message(), "reasons": []}}, "", as_json=True)
        return 2
    except typer.Abort:
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except PegboardError as error:
        emit_error(error, as_json=as_json)
        return 2
