"""`pegboard generate`: prompts in, text out, streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from ..errors import InvalidRequest, RequestFailed
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

if TYPE_CHECKING:
    from ..request import Delta, RequestOutput


def generate(
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="May be repeated; '-' reads standard input.")],
    model: ModelOption = None,
    config: ConfigOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text at this string; may be repeated.")] = None,
    min_tokens: Annotated[int, typer.Option(help="New tokens before the text may end.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that were there get rarer.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Subtracted once from tokens that were written.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Subtracted each time that they were written.")] = 0.0,
    num_beams: Annotated[int, typer.Option(help="Beam search of so many beams, if above 1.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Beam search: above 0 favours long texts.")] = 1.0,
    early_stopping: Annotated[str, typer.Option(help="Beam search: true, false or never.")] = "false",
    best_of: Annotated[int | None, typer.Option(help="Draw so many texts, print the most probable one.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema: the text is JSON that it allows.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole text matches it.")] = None,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt and line.")] = False,
) -> None:
    """Generate text. One prompt is streamed; several run together and are printed in order."""
    from ..contracts.sampler import SamplingParams
    from ..request import Request

    if system is not None and not chat:
        raise InvalidRequest("--system needs --chat")
    texts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompt]
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=_early_stopping(early_stopping),
        best_of=best_of,
        processors=_structured(json_schema, regex),
    )
    with open_engine(model, config, overrides, quiet=as_json, processors=tuple(sampling.processors)) as engine:
        engine.check(sampling)
        before = [] if system is None else [{"role": "system", "content": system}]
        requests = [
            engine.chat_request([*before, {"role": "user", "content": text}], sampling=sampling)
            if chat
            else Request(prompt=text, sampling=sampling)
            for text in texts
        ]
        if len(requests) == 1 and not as_json:
            print_stream(engine.stream(requests[0]))
            return
        outputs = engine.generate(requests, progress=not as_json and sys.stderr.isatty())
    for output in outputs:
        print(_line(output) if as_json else output.text)
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        if as_json:  # each line carries its own error
            raise typer.Exit(2)
        raise RequestFailed(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}")


def _structured(json_schema: Path | None, regex: str | None) -> dict[str, dict[str, str]]:
    """What the processor `structured` is asked for."""
    asked = {}
    if json_schema is not None:
        try:
            asked["json_schema"] = json_schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"--json-schema: {json_schema} can't be read: {error}") from None
    if regex is not None:
        asked["regex"] = regex
    return {"structured": asked} if asked else {}


def _early_stopping(text: str) -> bool | Literal["never"]:
    match text:
        case "true" | "false":
            return text == "true"
        case "never":
            return "never"
    raise InvalidRequest(f"--early-stopping is {text!r}, must be true, false or never")


def print_stream(deltas: Iterator[Delta]) -> str:
    """Print the pieces as they come; returns the text. RequestFailed when it ended with an error."""
    pieces: list[str] = []
    try:
        for delta in deltas:
            print(delta.text, end="", flush=True)
            pieces.append(delta.text)
            if delta.error is not None:
                raise RequestFailed(delta.error)
    finally:
        print()
    return "".join(pieces)


def _line(output: RequestOutput) -> str:
    data = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "metrics": output.metrics,
    }
    return msgspec.json.encode(data if output.error is None else {**data, "error": output.error}).decode()
