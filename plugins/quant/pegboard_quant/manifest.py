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
        Part(
            role="quantizer",
            name="blocks-cuda",
            factory="pegboard_quant.packed.blocks_quantizer:BlocksCudaQuantizer",
            options="pegboard_quant.options:BlocksCudaOptions",
            summary="GGUF blocks of Q4_0, Q4_1 and Q4_K stay packed on a GPU",
            matches=("gguf",),
            devices=("cuda",),
            priority=10,
        ),
        Part(
            role="quantizer",
            name="awq",
            factory="pegboard_quant.packed.quantizers:AwqQuantizer",
            options="pegboard_quant.options:PackedOptions",
            summary="AWQ checkpoints (GEMM layout), 4 bits, packed in memory",
            matches=("awq",),
        ),
        Part(
            role="quantizer",
            name="gptq",
            factory="pegboard_quant.packed.quantizers:GptqQuantizer",
            options="pegboard_quant.options:PackedOptions",
            summary="GPTQ checkpoints, 4 and 8 bits, act-order too, packed in memory",
            matches=("gptq",),
        ),
        Part(
            role="quantizer",
            name="compressed-tensors",
            factory="pegboard_quant.packed.quantizers:CompressedTensorsQuantizer",
            options="pegboard_quant.options:PackedOptions",
            summary="compressed-tensors checkpoints, W4A16 and W8A16 (pack-quantized), packed in memory",
            matches=("compressed-tensors",),
        ),
        Part(
            role="quantizer",
            name="int4",
            factory="pegboard_quant.packed.on_load:Int4Quantizer",
            options="pegboard_quant.options:Rounding4Options",
            summary="Rounds dense weights to 4 bits when they are loaded; by name only",
            priority=-100,
        ),
        Part(
            role="quantizer",
            name="int8",
            factory="pegboard_quant.packed.on_load:Int8Quantizer",
            options="pegboard_quant.options:Rounding8Options",
            summary="Rounds dense weights to 8 bits when they are loaded; by name only",
            priority=-100,
        ),
    )
