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
            role="executor",
            name="local",
            factory="pegboard.runner:LocalExecutor",
            summary="The model runs in this process, on one device",
        ),
    )
