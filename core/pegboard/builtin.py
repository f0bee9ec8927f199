"""The core's own parts, offered through the same door as everybody else's."""

from __future__ import annotations

from .contracts.part import Part
from .registry.hookspecs import hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="ops",
            name="torch",
            factory="pegboard.ops:TorchOps",
            summary="Every op in plain torch, on any device; the reference for kernels",
        ),
        Part(
            role="model",
            name="llama",
            factory="pegboard.models.llama:Llama",
            summary="Llama and its relatives: pre-norm decoder, GQA, rope, gated MLP",
            matches=("LlamaForCausalLM",),
        ),
        Part(
            role="model",
            name="mistral",
            factory="pegboard.models.mistral:Mistral",
            summary="Mistral: Llama with a window over all layers, or none",
            matches=("MistralForCausalLM",),
        ),
        Part(
            role="model",
            name="mixtral",
            factory="pegboard.models.mistral:Mixtral",
            summary="Mixtral: Mistral with a mixture of experts",
            matches=("MixtralForCausalLM",),
        ),
        Part(
            role="model",
            name="qwen2",
            factory="pegboard.models.qwen:Qwen2",
            summary="Qwen2 and Qwen2.5: biases on q, k and v, windows on the upper layers",
            matches=("Qwen2ForCausalLM",),
        ),
        Part(
            role="model",
            name="qwen3",
            factory="pegboard.models.qwen:Qwen3",
            summary="Qwen3: norms on q and k, windows on the upper layers",
            matches=("Qwen3ForCausalLM",),
        ),
        Part(
            role="model",
            name="qwen3-moe",
            factory="pegboard.models.qwen:Qwen3Moe",
            summary="Qwen3 with a mixture of experts",
            matches=("Qwen3MoeForCausalLM",),
        ),
        Part(
            role="model",
            name="phi3",
            factory="pegboard.models.phi3:Phi3",
            summary="Phi-3 and Phi-3.5: fused projections, partial rope, longrope",
            matches=("Phi3ForCausalLM",),
        ),
        Part(
            role="model",
            name="gemma3",
            factory="pegboard.models.gemma3:Gemma3",
            summary="Gemma 3, text only: four norms a layer, window layers with their own rope",
            matches=("Gemma3ForCausalLM",),
        ),
        Part(
            role="checkpoint",
            name="safetensors",
            factory="pegboard.checkpoints.safetensors:SafetensorsCheckpoint",
            summary="Hugging Face folders with one or many safetensors files",
            matches=("safetensors",),
        ),
        Part(
            role="checkpoint",
            name="gguf",
            factory="pegboard.checkpoints.gguf:GGUFCheckpoint",
            summary="GGUF files, dequantised on reading or kept in blocks",
            matches=("gguf",),
        ),
        Part(
            role="checkpoint",
            name="random",
            factory="pegboard.checkpoints.random:RandomCheckpoint",
            summary="random:SHAPE, weights that are drawn: for benchmarks only",
            matches=("random",),
        ),
        Part(
            role="executor",
            name="local",
            factory="pegboard.runner:LocalExecutor",
            summary="The model runs in this process, on one device",
        ),
    )
