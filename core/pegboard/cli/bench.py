"""`pegboard bench`: how fast a model runs here, with the parts that a config chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from .engine_options import ConfigOption, ModelOption, SetOption, open_engine
from .output import AsJson, emit

if TYPE_CHECKING:
    from ..benchmark import Setup

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure speed on random prompts.")

Count = Annotated[int, typer.Option("--prompts", min=1, help="How many prompts.")]
Output = Annotated[int, typer.Option("--output", min=1, help="New tokens of each prompt.")]
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
    rows = [[field, _number(value)] for field, value in msgspec.structs.asdict(found).items()]
    data = {"setup": used, "throughput": found}
    emit(msgspec.to_builtins(data), "\n".join([*_setup_lines(used), "", *_table(rows)]), as_json=as_json)


@app.command()
def latency(
    model: ModelOption = None,
    config: ConfigOption = None,
    input: Annotated[
        list[int], typer.Option("--input", min=1, help="Prompt length to time the first token of; may be repeated.")
    ] = [128, 512],  # noqa: B006 - typer copies it
    batch: Annotated[
        list[int], typer.Option("--batch", min=1, help="Sequences at once to time the tokens of; may be repeated.")
    ] = [1, 8],  # noqa: B006
    output: Output = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="The best counts.")] = 3,
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
    lines = [*_setup_lines(used), ""]
    lines += _table(
        [["prompt", "TTFT ms", "median", "tokens/s"]]
        + [[str(t.input_tokens), _ms(t.best), _ms(t.median), _number(t.tokens_per_second)] for t in first]
    )
    lines += [
        "",
        *_table(
            [["batch", "ITL ms", "tokens/s"]]
            + [[str(i.batch), _ms(i.seconds), _number(i.tokens_per_second)] for i in between]
        ),
    ]
    data: dict[str, Any] = {"setup": used, "ttft": first, "itl": between}
    emit(msgspec.to_builtins(data), "\n".join(lines), as_json=as_json)


def _setup_lines(used: Setup) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in used.versions.items())
    return [
        f"model: {used.model}",
        f"device: {used.device}, {used.dtype}, {used.threads} threads; {versions}",
        "parts: " + ", ".join(f"{where} {name}" for where, name in used.parts.items()),
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"
