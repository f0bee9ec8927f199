"""The tables of `pegboard compare`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .bench_tables import number, table

if TYPE_CHECKING:
    from ..comparing import Comparison, PartError, Side

_COLUMNS = ("norm", "projection", "rope", "attention", "mlp")


def comparison_lines(found: Comparison) -> list[str]:
    lines = [_side("A", found.a, found.b), _side("B", found.b, found.a), ""]
    lines += [_verdict(found), ""]
    lines += [*_layer_table(found.parts), ""]
    lines += [*_token_lines(found), ""]
    rows = [["", "prefill tokens/s", "decode tokens/s"]]
    for name, speed in (("A", found.speed_a), ("B", found.speed_b)):
        rows.append([name, number(speed.prefill), "-" if speed.decode is None else number(speed.decode)])
    return [*lines, *table(rows)]


def place(part: PartError) -> str:
    """E.g. "layer 3, attention (prompt 0)"."""
    at = "" if part.layer is None else f"layer {part.layer}, "
    name = "" if part.name == part.part else f" {part.name}"
    return f"{at}{part.part}{name} (prompt {part.prompt})"


def _side(letter: str, side: Side, other: Side) -> str:
    """With the parts that the other has not."""
    own = [f"{where} {name}" for where, name in side.parts.items() if other.parts.get(where) != name]
    return ", ".join([f"{letter}: {side.model}", side.device, side.dtype, *own])


def _verdict(found: Comparison) -> str:
    if found.first is None:
        return f"agree: no part differs by more than {found.tolerance:.2g}"
    first = found.first
    if first.part == "sampler":
        return f"DIFFER first in {place(first)}: {first.relative:.1%} of the choices, and the logits don't explain it"
    return (
        f"DIFFER first in {place(first)}: by up to {first.max_abs:.2g}, relative {first.relative:.2g}, "
        f"tolerated {found.tolerance:.2g}"
    )


def _layer_table(parts: Sequence[PartError]) -> Iterator[str]:
    rows = [["layer", "max abs", "relative", *_COLUMNS]]
    layers = sorted({part.layer for part in parts if part.layer is not None})
    for layer in layers:
        own = [part for part in parts if part.layer == layer]
        cells = [[part.relative for part in own if part.part == column] for column in _COLUMNS]
        rows.append(
            [
                str(layer),
                _small(max(part.max_abs for part in own)),
                _small(max(part.relative for part in own)),
                *(_small(max(cell)) if cell else "-" for cell in cells),
            ]
        )
    for part in parts:
        if part.layer is None and part.part in ("embedding", "logits"):
            rows.append([part.part, _small(part.max_abs), _small(part.relative), *("" for _ in _COLUMNS)])
    yield from (line.rstrip() for line in table(rows))


def _token_lines(found: Comparison) -> list[str]:
    tokens = found.tokens
    line = f"tokens: {tokens.equal:.1%} of {tokens.tokens} equal in {tokens.prompts} prompts"
    if tokens.first_difference is not None:
        prompt, token = tokens.first_difference
        line += f"; first difference: prompt {prompt}, token {token}"
    if found.ties:
        line += f"; {found.ties} choices are so close that rounding decides"
    return [line]


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
