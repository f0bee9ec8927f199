"""What this plugin offers. Imports neither torch nor the parts themselves."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="cache",
            name="paged",
            factory="pegboard_cache.paged:PagedCache",
            options="pegboard_cache.options:PagedOptions",
            summary="Pages with reference counts, copy on write and prefix reuse",
        ),
    )
