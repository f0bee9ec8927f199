"""What this distribution offers. Read whenever plugins are listed: import nothing heavy here."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="logits_processor",
            name="no-repeat-ngram",
            factory="no_repeat_ngram.processor:NoRepeatNgram",
            summary="No run of tokens comes twice in a text",
        ),
    )
