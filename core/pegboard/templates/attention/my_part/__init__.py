"""What this distribution offers. Read whenever plugins are listed: import nothing heavy here."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="attention",
            name="my-part",
            factory="my_part.attention:MyPart",
            options="my_part.options:Options",
            summary="One row at a time, a block of entries at a time",
            devices=("cpu",),
        ),
    )
