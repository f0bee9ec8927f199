"""What this plugin offers. Imports neither torch nor the parts themselves."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="attention",
            name="torch",
            factory="pegboard_attention.torch_backend:TorchAttention",
            summary="Paged attention in plain torch, on any device; the reference for kernels",
        ),
        Part(
            role="attention",
            name="flash_decoding",
            factory="pegboard_attention.flash_decoding:FlashDecoding",
            summary="Decode and verify rows in Triton, each split over the whole device; plain, INT8 and FP8 caches",
            requires=("triton",),
            devices=("cuda",),
            priority=10,
        ),
        Part(
            role="attention",
            name="flash_attention_2",
            factory="pegboard_attention.flash_attention_2.backend:FlashAttention2",
            options="pegboard_attention.flash_attention_2.options:FlashAttention2Options",
            summary="FlashAttention-2 prefill in Triton, with a path of its own for Hopper GPUs",
            priority=10,
            requires=("triton",),
            devices=("cuda",),
        ),
    )
