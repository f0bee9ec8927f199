"""What this distribution offers. Read whenever plugins are listed: import nothing heavy here."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="sampler",
            name="my-part",
            factory="my_part.sampler:MyPart",
            options="my_part.options:Options",
            summary="Every sampling parameter, and top-n-sigma",
            devices=("cpu",),
        ),
    )
