"""`pegboard chat`: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from ..errors import PegboardError
from .engine_options import (
    ConfigOption,
    MaxTokens,
    MinP,
    ModelOption,
    Seed,
    SetOption,
    Temperature,
    TopK,
    TopP,
    open_engine,
)
from .generate import print_stream

_HELP = "Type a message. /clear begins anew, /exit (or Ctrl-D) ends, Ctrl-C stops an answer."


def chat(
    model: ModelOption = None,
    config: ConfigOption = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    seed: Seed = None,
    overrides: SetOption = None,
) -> None:
    """An interactive conversation; answers are streamed."""
    from ..contracts.sampler import SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    with open_engine(model, config, overrides, quiet=False) as engine:
        typer.echo(_HELP, err=True)
        messages = list(start)
        while (text := _ask()) is not None:
            if text == "/clear":
                messages = list(start)
            elif text.startswith("/") and " " not in text and text.count("/") == 1:
                typer.echo(f"error: there is no {text}; {_HELP}", err=True)
            elif text:
                messages.append({"role": "user", "content": text})
                try:
                    answer = print_stream(engine.stream_chat(messages, sampling))
                    messages.append({"role": "assistant", "content": answer})
                except KeyboardInterrupt:
                    messages.pop()
                except PegboardError as error:
                    messages.pop()
                    hint = "; /clear forgets what was said" if len(messages) > len(start) else ""
                    typer.echo(f"error: {error}{hint}", err=True)


def _ask() -> str | None:
    """The next message; None at the end."""
    with contextlib.suppress(ImportError):  # there are Pythons without it
        import readline  # noqa: F401 - lets `input` edit its line, and recall the ones before

    try:
        text = input("> ").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        return None
    return None if text == "/exit" else text
