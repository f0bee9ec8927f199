"""`pegboard bench`: how fast a model runs here, with the parts that a config chooses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..errors import ConfigError
from .bench_tables import end_to_end_lines, itl_table, number, setup_lines, table, ttft_table
from .engine_options import ConfigOption, ModelOption, SetOption, TopK, TopP, make_engine, open_engine
from .output import AsJson, emit

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure speed on random prompts.")

Count = Annotated[int, typer.Option("--prompts", min=1, help="How many prompts.")]
Output = Annotated[int, typer.Option("--output", min=1, help="New tokens of each prompt.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="The best counts.")]
Batches = Annotated[
    list[int], typer.Option("--batch", min=1, help="Sequences at once to time the tokens of; may be repeated.")
]
Lengths = Annotated[
    list[int], typer.Option("--input", min=1, help="Prompt length to time the first token of; may be repeated.")
]
RandomSeed = Annotated[int, typer.Option("--seed", help="Of the prompts.")]


@app.command()
def offline(
    model: ModelOption = None,
    config: ConfigOption = None,
    prompts: Count = 16,
    input: Annotated[int, typer.Option("--input", min=1, help="Tokens of each prompt.")] = 128,
    output: Output = 64,
    seed: RandomSeed = 0,
    overrides: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Throughput: many prompts at once, until the last is done."""
    from ..benchmark import Prompts, measure_throughput, setup

    with open_engine(model, config, overrides, quiet=as_json) as engine:
        found = measure_throughput(engine, Prompts(engine, seed), prompts, input, output)
        used = setup(engine)
    rows = [[field, number(value)] for field, value in msgspec.structs.asdict(found).items()]
    data = {"setup": used, "throughput": found}
    emit(msgspec.to_builtins(data), "\n".join([*setup_lines(used), "", *table(rows)]), as_json=as_json)


@app.command()
def latency(
    model: ModelOption = None,
    config: ConfigOption = None,
    input: Lengths = [128, 512],  # noqa: B006 - typer copies it
    batch: Batches = [1, 8],  # noqa: B006
    output: Output = 64,
    repeats: Repeats = 3,
    seed: RandomSeed = 0,
    overrides: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """TTFT by prompt length, and ITL by batch after the first of the lengths."""
    from ..benchmark import Prompts, measure_itl, measure_ttft, setup

    with open_engine(model, config, overrides, quiet=as_json) as engine:
        prompts = Prompts(engine, seed)
        first = list(measure_ttft(engine, prompts, input, repeats))
        between = list(measure_itl(engine, prompts, batch, input[0], output, repeats))
        used = setup(engine)
    lines = [*setup_lines(used), ""]
    lines += [*ttft_table(first), "", *itl_table(between)]
    data: dict[str, Any] = {"setup": used, "ttft": first, "itl": between}
    emit(msgspec.to_builtins(data), "\n".join(lines), as_json=as_json)


@app.command()
def e2e(
    model: ModelOption = None,
    shape: Annotated[str | None, typer.Option(help="Random weights: -m random:SHAPE in short.")] = None,
    config: ConfigOption = None,
    input: Lengths = [128, 512],  # noqa: B006
    batch: Batches = [1, 8],  # noqa: B006
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt of a batch.")] = 128,
    output: Output = 128,
    repeats: Repeats = 2,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Mixed requests, for the throughput.")] = 16,
    request_input: Annotated[str, typer.Option(help="Their prompt lengths, LOW:HIGH.")] = "32:128",
    request_output: Annotated[str, typer.Option(help="Their new tokens, LOW:HIGH.")] = "16:64",
    temperature: Annotated[float, typer.Option(help="Of the mixed requests; 0 is greedy.")] = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Run the mixed requests once, not twice.")] = False,
    seed: RandomSeed = 0,
    profile: Annotated[
        Path | None, typer.Option(file_okay=False, help="A folder for traces; adds tables of kernels.")
    ] = None,
    overrides: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Everything at once: ready time, TTFT, ITL, host time, throughput, repeatability and memory."""
    from ..benchmark import Load, measure_end_to_end

    if shape is not None and model is not None:
        raise ConfigError("--shape and --model exclude each other: --shape NAME is --model random:NAME")
    load = Load(
        seed=seed,
        ttft_inputs=tuple(input),
        batches=tuple(batch),
        prompt=prompt,
        output=output,
        repeats=repeats,
        requests=requests,
        request_input=_range("--request-input", request_input),
        request_output=_range("--request-output", request_output),
        twice=not once,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    found = measure_end_to_end(
        lambda watchers: make_engine(
            model if shape is None else f"random:{shape}", config, overrides, quiet=as_json, watchers=watchers
        ),
        load,
        profile=profile,
    )
    emit(msgspec.to_builtins(found), "\n".join(end_to_end_lines(found)), as_json=as_json)


def _range(option: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"{option} is {text!r}, must be LOW:HIGH with 1 <= LOW <= HIGH, e.g. 32:128")
    return low, high
