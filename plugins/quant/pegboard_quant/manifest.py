"""What this plugin offers. Imports neither torch nor the parts themselves."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="quantizer",
            name="none",
            factory="pegboard_quant.dense:DenseQuantizer",
            summary="Dense linears in the dtype of the activations",
            matches=("none", "gguf"),
        ),
    )
