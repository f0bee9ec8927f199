"""What this distribution offers. Read whenever plugins are listed: import nothing heavy here."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="speculator",
            name="my-part",
            factory="my_part.speculator:MyPart",
            options="my_part.options:Options",
            summary="Drafts what followed a token the last time",
        ),
    )
