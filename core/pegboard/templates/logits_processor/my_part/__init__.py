"""What this distribution offers. Read whenever plugins are listed: import nothing heavy here."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="logits_processor",
            name="my-part",
            factory="my_part.processor:MyPart",
            options="my_part.options:Options",
            summary="Recent tokens become less probable",
        ),
    )
