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
    from ..request import Completion, Delta, RequestOutput


def generate(
    context: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="May be repeated; '-' reads standard input.")
    ] = None,
    ids: Annotated[list[str] | None, typer.Option("--ids", help="A prompt of token ids, 1,17,42.")] = None,
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
    n: Annotated[int, typer.Option("--n", "-n", help="Texts of each prompt.")] = 1,
    best_of: Annotated[int | None, typer.Option(help="Draw so many texts, print the n most probable ones.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of each token, and of so many best ones.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema: the text is JSON that it allows.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole text matches it.")] = None,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt and line.")] = False,
) -> None:
    """Generate text. One prompt is streamed; several run together and are printed in order."""
    from ..comparing.prompts import parse_ids
    from ..contracts.sampler import SamplingParams
    from ..request import Request

    if not prompt and not ids:
        raise typer.BadParameter("give a text, or token ids by --ids", ctx=context, param_hint="'--prompt' / '-p'")
    if system is not None and not chat:
        raise InvalidRequest("--system needs --chat")
    if chat and ids:
        raise InvalidRequest("--chat puts texts into a template, not --ids: leave one of them out")
    if logprobs is not None and not as_json:
        raise InvalidRequest("--logprobs needs --json")
    texts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompt or ()]
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
        n=n,
        best_of=best_of,
        logprobs=logprobs,
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
        requests += [Request(prompt=parse_ids(text, "--ids"), sampling=sampling) for text in ids or ()]
        has_text = engine.has_tokenizer
        if len(requests) == n == 1 and not as_json and has_text:
            print_stream(engine.stream(requests[0]))
            return
        outputs = engine.generate(requests, progress=not as_json and sys.stderr.isatty())
    for output in outputs:
        if as_json:
            print(_line(output))
            continue
        for completion in output.completions:
            if n > 1:
                print(f"--- {completion.index + 1} of {n}")
            print(completion.text if has_text else ",".join(map(str, completion.token_ids)))
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
    """The first text beside the others, if there are."""
    texts = [_facts(completion) for completion in output.completions]
    first = texts[0] if texts else _facts(output)
    more = {"completions": texts} if len(texts) > 1 else {}
    failed = {} if output.error is None else {"error": output.error}
    return msgspec.json.encode({**first, **more, **failed}).decode()


def _facts(found: Completion | RequestOutput) -> dict[str, object]:
    facts: dict[str, object] = {
        "text": found.text,
        "token_ids": found.token_ids,
        "finish_reason": found.finish_reason,
        "metrics": found.metrics,
    }
    asked = {name: getattr(found, name, None) for name in ("score", "logprobs")}
    return facts | {name: value for name, value in asked.items() if value is not None}
