"""What this plugin offers. Imports neither torch nor the parts themselves."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="scheduler",
            name="continuous",
            factory="pegboard_scheduling.continuous:ContinuousScheduler",
            options="pegboard_scheduling.options:ContinuousOptions",
            summary="Continuous batching: requests join and leave at every step, prefill in chunks",
            priority=10,
        ),
        Part(
            role="scheduler",
            name="static",
            factory="pegboard_scheduling.static:StaticScheduler",
            options="pegboard_scheduling.options:StaticOptions",
            summary="Static batching: a batch runs until its last request ends; the baseline to compare with",
        ),
    )
