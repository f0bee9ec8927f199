"""Options that the commands which run a model share, and the engine that they ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..engine import Engine

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="A file, a folder, or a name; see `pegboard models`.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="A TOML, YAML or JSON file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override one field, e.g. cache.options.prefix_reuse=false.")
]
MaxTokens = Annotated[int | None, typer.Option(help="New tokens at most; as many as fit if left out.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set whose probability reaches p.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less probable than this share of the best one.")]
Seed = Annotated[int | None, typer.Option(help="Makes the text reproducible.")]


def read_options(
    model: str | None, config: Path | None, overrides: list[str] | None, *, otherwise: str | None = None
) -> EngineConfig:
    """The config of the file, if there is one, for this model, if it is named here; `otherwise`: the model where none
    is named anywhere."""
    from ..config import load_config
    from ..config_sources import read_config
    from ..errors import ConfigError

    values: dict[str, Any] = {} if otherwise is None else {"model": otherwise}
    values |= {} if config is None else read_config(config)
    if model is not None:
        values["model"] = model
    try:
        return load_config(values, overrides or ())
    except ConfigError as error:
        if config is None:
            raise
        raise ConfigError(f"config {config} is not valid", error.reasons) from None


@contextmanager
def open_engine(
    model: str | None,
    config: Path | None,
    overrides: list[str] | None,
    *,
    quiet: bool,
    processors: Sequence[str] = (),
) -> Iterator[Engine]:
    """The engine that the options describe, with a bar on stderr while it loads."""
    with make_engine(model, config, overrides, quiet=quiet, processors=processors) as engine:
        yield engine


def make_engine(
    model: str | None,
    config: Path | None,
    overrides: list[str] | None,
    *,
    quiet: bool,
    watchers: Sequence[object] = (),
    processors: Sequence[str] = (),
) -> Engine:
    """The same, for the caller to close. `processors` are logits processors beside those of the config."""
    from ..config import load_config
    from ..engine import Engine

    loaded = read_options(model, config, overrides)
    listed = {choice.use for choice in loaded.logits_processors}
    more = [{"use": name} for name in processors if name not in listed]
    if more:
        known = [choice.model_dump() for choice in loaded.logits_processors]
        loaded = load_config(loaded, {"logits_processors": [*known, *more]})
    with loading_bar(shown=not quiet) as advance:
        return Engine(config=loaded, progress=advance, watchers=watchers)


@contextmanager
def loading_bar(*, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, if that is a terminal, for as long as what is inside runs."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
