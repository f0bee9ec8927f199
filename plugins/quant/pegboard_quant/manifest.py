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
            options="pegboard_quant.options:DenseOptions",
            summary="Dense linears in the dtype of the activations",
            matches=("none", "gguf"),
        ),
        Part(
            role="quantizer",
            name="int8-cpu",
            factory="pegboard_quant.int8_cpu:Int8CpuQuantizer",
            options="pegboard_quant.options:Int8CpuOptions",
            summary="INT8 weights on the CPU; loses precision, so it must be asked for by name",
            devices=("cpu",),
            priority=-100,  # `auto` passes over a quantizer without `matches`, but for when no model is named
        ),
    )
