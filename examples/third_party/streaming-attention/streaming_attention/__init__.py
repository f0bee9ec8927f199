"""What this distribution offers. Read whenever plugins are listed: import nothing heavy here."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="attention",
            name="streaming",
            factory="streaming_attention.backend:StreamingAttention",
            options="streaming_attention.options:Options",
            summary="A window and the first tokens (StreamingLLM); not exact, so it must be asked for by name",
            devices=("cpu",),
            priority=-1000,
        ),
    )
