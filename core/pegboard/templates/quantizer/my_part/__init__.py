"""What this distribution offers. Read whenever plugins are listed: import nothing heavy here."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="quantizer",
            name="my-part",
            factory="my_part.quantizer:MyPart",
            options="my_part.options:Options",
            summary="Rounds dense weights to INT4 when they are loaded; by name only",
        ),
    )
