"""What this distribution offers. Read whenever plugins are listed: import nothing heavy here."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="scheduler",
            name="shortest-job-first",
            factory="shortest_job_first.scheduler:ShortestJobFirst",
            options="shortest_job_first.options:Options",
            summary="Shortest jobs first, with ageing",
            objectives={"latency": 20},
        ),
    )
