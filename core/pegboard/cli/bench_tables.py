"""The tables of `pegboard bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..benchmark import ITL, TTFT, EndToEnd, HostTime, Profile, Setup, Throughput

#: Of a profile's table.
_KERNELS, _NAME = 25, 60


def setup_lines(used: Setup) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in used.versions.items())
    return [
        f"model: {used.model}",
        f"device: {used.device}, {used.dtype}, {used.threads} threads; {versions}",
        "parts: " + ", ".join(f"{where} {name}" for where, name in used.parts.items()),
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def ttft_table(found: Sequence[TTFT]) -> list[str]:
    rows = [[str(t.input_tokens), ms(t.best), ms(t.median), number(t.tokens_per_second)] for t in found]
    return table([["prompt", "TTFT ms", "median", "tokens/s"], *rows])


def itl_table(found: Sequence[ITL]) -> list[str]:
    rows = [[str(i.batch), ms(i.seconds), number(i.tokens_per_second)] for i in found]
    return table([["batch", "ITL ms", "tokens/s"], *rows])


def _host_table(found: Sequence[HostTime]) -> list[str]:
    fields = ("step", "median", "p90", "schedule", "executor", "commit", "emit", "launch", "retire")
    rows = [[str(h.rows), str(h.steps), *(ms(getattr(h, field)) for field in fields)] for h in found]
    return table([["rows", "steps", "step ms", "host ms", *fields[2:]], *rows])


def end_to_end_lines(found: EndToEnd) -> list[str]:
    memory = found.memory
    lone = [
        ["constructed after s", number(found.ready.constructed)],
        ["first token after s", number(found.ready.first_token)],
        ["peak of the process MB", _mb(memory.host)],
        ["peak of the device MB", _mb(memory.device)],
        [f"same tokens again ({found.repeated.prompts} prompts)", number(found.repeated.match)],
    ]
    blocks = [
        setup_lines(found.setup),
        table(lone),
        ttft_table(found.ttft),
        itl_table(found.itl),
        _host_table(found.host),
        _throughput_table(found.throughput, found.throughput_again),
        *(_profile_lines(profile) for profile in found.profiles),
    ]
    return [line for block in blocks if block for line in ("", *block)][1:]


def _mb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.0f}"


def _throughput_table(first: Throughput, again: Throughput | None) -> list[str]:
    turns = {"first": first} | ({} if again is None else {"again": again})
    fields = msgspec.structs.asdict(first)
    return table(
        [["", *turns], *([field, *(number(getattr(turn, field)) for turn in turns.values())] for field in fields)]
    )


def _profile_lines(found: Profile) -> list[str]:
    """The kernels that took most."""
    head = (
        f"{found.batch} x {found.input} tokens and {found.output} new: {ms(found.seconds)} ms, "
        f"kernels {ms(found.busy)}, gaps {ms(found.gaps)}; {found.trace}"
    )
    rows = [
        [kernel.name[:_NAME], str(kernel.count), ms(kernel.seconds), number(kernel.seconds / kernel.count * 1e6)]
        for kernel in found.kernels[:_KERNELS]
    ]
    return [head, *table([["kernel", "launches", "ms", "us each"], *rows])]
