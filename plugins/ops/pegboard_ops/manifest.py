"""What this plugin offers. Imports neither torch nor the parts themselves."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="ops",
            name="triton",
            factory="pegboard_ops.triton_ops:TritonOps",
            summary="Fused Triton kernels: norms, rope with cache write, gated activation, matmuls of few rows",
            requires=("triton",),
            devices=("cuda",),
            priority=10,
        ),
    )
