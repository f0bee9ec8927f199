"""What this plugin offers. Imports neither torch nor the parts themselves."""

from __future__ import annotations

from pegboard import Part, hookimpl


@hookimpl
def pegboard_parts() -> tuple[Part, ...]:
    return (
        Part(
            role="sampler",
            name="torch",
            factory="pegboard_sampling.torch_sampler:TorchSampler",
            options="pegboard_sampling.options:TorchSamplerOptions",
            summary="Every sampling parameter in plain torch, on any device",
        ),
        Part(
            role="sampler",
            name="fused",
            factory="pegboard_sampling.fused.sampler:FusedSampler",
            options="pegboard_sampling.options:FusedSamplerOptions",
            summary="Every sampling parameter in Triton without sorting the vocabulary; runs inside of CUDA graphs",
            requires=("triton",),
            devices=("cuda",),
            priority=10,
        ),
        Part(
            role="speculator",
            name="ngram",
            factory="pegboard_sampling.speculation.ngram:NGramSpeculator",
            options="pegboard_sampling.speculation.options:NGramOptions",
            summary="Prompt lookup: proposes what followed the last tokens when they came before, on any device",
            priority=10,
        ),
        Part(
            role="speculator",
            name="draft_model",
            factory="pegboard_sampling.speculation.draft_model:DraftModelSpeculator",
            options="pegboard_sampling.speculation.options:DraftModelOptions",
            summary="A small model drafts for a large one, with the same noise and a cache of its own",
        ),
        Part(
            role="speculator",
            name="medusa",
            factory="pegboard_sampling.speculation.medusa:MedusaSpeculator",
            options="pegboard_sampling.speculation.options:MedusaOptions",
            summary="Trained heads on the target's last hidden state, one for each token ahead (Medusa-1)",
        ),
        Part(
            role="speculator",
            name="eagle",
            factory="pegboard_sampling.speculation.eagle:EagleSpeculator",
            options="pegboard_sampling.speculation.options:EagleOptions",
            summary="A trained layer that continues the target's hidden states, with a cache of its own (EAGLE-1)",
        ),
        Part(
            role="logits_processor",
            name="structured",
            factory="pegboard_sampling.structured.processor:StructuredOutput",
            summary="Texts that match a JSON schema, a regular expression or a grammar",
            requires=("llguidance",),
            install='pip install "pegboard[structured]"',
        ),
    )
