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
        Part(
            role="quantizer",
            name="blocks-cpu",
            factory="pegboard_cpu.blocks_quantizer:BlocksCpuQuantizer",
            summary="GGUF blocks kept packed (Q4_0 to Q8_0, Q4_K to Q6_K), activations rounded to bytes",
            requires=("numba",),
            install='pip install "pegboard[cpu]"',
            devices=("cpu",),
            matches=("gguf",),
            # It rounds activations: by name, or where memory counts
            priority=-100,
            objectives={"memory": 200},
        ),
    )
