"""What this plugin offers. Imports neither torch nor numba nor the parts themselves."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="ops",
            name="numba",
            factory="pegboard_cpu.ops:NumbaOps",
            summary="Ops compiled for this CPU, float32: norm, product, activation and residual in one, for few rows",
            requires=("numba",),
            install='pip install "pegboard[cpu]"',
            devices=("cpu",),
            priority=10,
        ),
        Part(
            role="attention",
            name="numba",
            factory="pegboard_cpu.attention:NumbaAttention",
            summary="Attention compiled for this CPU, float32: reads the pages where they lie",
            requires=("numba",),
            install='pip install "pegboard[cpu]"',
            devices=("cpu",),
            priority=10,
        ),
    )
