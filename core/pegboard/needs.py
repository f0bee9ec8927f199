"""What each part is asked to serve: derived from config, checkpoint and device alone, the same in every process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from .config import EngineConfig
from .contracts.attention import AttentionLayer, AttentionNeed
from .contracts.checkpoint import Checkpoint
from .contracts.device import DeviceFacts
from .contracts.model import ModelSpec
from .contracts.ops import OpsNeed
from .contracts.quantizer import QuantizerNeed
from .contracts.sampler import SamplerNeed
from .contracts.scheduler import SchedulerNeed
from .dtypes import ELEMENT_BYTES, FLOAT_DTYPES
from .errors import CheckpointError

logger = logging.getLogger("pegboard")


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """By role. The cache's need comes later: it depends on the layouts that the parts agree on."""

    quantizer: QuantizerNeed
    ops: OpsNeed
    prefill: AttentionNeed
    decode: AttentionNeed
    sampler: SamplerNeed
    scheduler: SchedulerNeed


def architecture(checkpoint: Checkpoint) -> str:
    """The config's architecture. CheckpointError: it names none."""
    named = checkpoint.config.get("architectures")
    if not isinstance(named, list | tuple) or not named or not isinstance(named[0], str):
        raise CheckpointError(f"config.json must name its architecture, e.g. ['LlamaForCausalLM']; it has {named!r}")
    return named[0]


def scheme(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The checkpoint's quantization_config, or {}. CheckpointError: it is no table."""
    found = checkpoint.config.get("quantization_config") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"quantization_config is {found!r} in config.json, must be a table with a quant_method")
    return found


def scheme_name(checkpoint: Checkpoint) -> str:
    """What a quantizer must recognise: the config's quant_method, "gguf" for weights in GGUF blocks, or "none"."""
    found = scheme(checkpoint)
    if found:
        return str(found.get("quant_method", "unknown"))
    dense = all(info.storage in ELEMENT_BYTES for info in checkpoint.tensors().values())
    return "none" if dense else "gguf"


def eos_ids(checkpoint: Checkpoint, vocab_size: int) -> frozenset[int] | None:
    """The ids that end a text, from generation_config.json first: chat models name their end of turn there. None: the
    checkpoint names none. CheckpointError: they are no ids. Ids that the vocabulary lacks can't be chosen."""
    for source in (checkpoint.generation, checkpoint.config):
        named = source.get("eos_token_id")
        if named is None:
            continue
        ids = named if isinstance(named, list | tuple) else [named]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(f"eos_token_id is {named!r}, must be a token id or a list of them")
        known = frozenset(i for i in ids if 0 <= i < vocab_size)
        if len(known) < len(ids):
            logger.warning("eos_token_id %s: only %s are in the vocabulary of %d", named, sorted(known), vocab_size)
        return known
    return None


def choose_dtype(asked: str, checkpoint: Checkpoint, device: DeviceFacts) -> str:
    """For "auto": float32 on CPU; on CUDA the checkpoint's own, or a 16-bit one where that is no float dtype."""
    if asked != "auto":
        return asked
    if device.type == "cpu":
        return "float32"
    stored = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "").removeprefix("torch.")
    if stored in FLOAT_DTYPES:
        return stored
    return "bfloat16" if device.capability is None or device.capability >= (8, 0) else "float16"


def choose_length(config: EngineConfig, spec: ModelSpec) -> tuple[int, list[str]]:
    """(longest prompt + output that is admitted, why that can't be)"""
    if config.max_length is None or config.max_length <= spec.context_length:
        return config.max_length or spec.context_length, []
    reason = f"max_length: {config.max_length} is more than the {spec.context_length} tokens the model was made for"
    return spec.context_length, [f"{reason}; lower it, or give the model's config a rope scaling that reaches so far"]


def page_sizes(config: EngineConfig, device: DeviceFacts) -> tuple[int, ...]:
    """Entries a page, best first: the first that attention serves is taken. Kernels on CUDA copy 64 entries at a time;
    elsewhere smaller pages, which prefixes share sooner, cost nothing."""
    if isinstance(config.page_size, int):
        return (config.page_size,)
    return (64, 16) if device.type == "cuda" else (16,)


def derive_needs(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: DeviceFacts,
    dtype: str,
    max_length: int,
    page_size: int,
    drafts: int = 0,
    trees: bool = False,
) -> Needs:
    """`drafts`: of a row at most; rows with up to 1 + drafts queries are decode rows. `trees`: they are trees."""
    layers = tuple(dict.fromkeys(layer for layer in spec.layers if isinstance(layer, AttentionLayer)))

    def attention(phase: Literal["prefill", "decode"], max_query: int) -> AttentionNeed:
        return AttentionNeed(
            device=device,
            dtype=dtype,
            kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
            page_size=page_size,
            layers=layers,
            phase=phase,
            max_query=max_query,
            max_rows=config.max_rows,
            max_length=max_length,
            ancestors=trees and phase == "decode",
            batch_invariant=config.batch_invariant,
        )

    return Needs(
        quantizer=QuantizerNeed(
            device=device,
            dtype=dtype,
            scheme=scheme(checkpoint),
            storages=frozenset(info.storage for info in checkpoint.tensors().values()),
            max_rows=config.max_rows,
            batch_invariant=config.batch_invariant,
            objective=config.objective,
        ),
        ops=OpsNeed(
            device=device,
            dtype=dtype,
            hidden_size=spec.hidden_size,
            head_sizes=tuple(dict.fromkeys(layer.head_size for layer in layers)),
            activations=spec.activations,
            batch_invariant=config.batch_invariant,
        ),
        prefill=attention("prefill", choose_step_tokens(config, device)),
        decode=attention("decode", 1 + drafts),
        sampler=SamplerNeed(
            device=device,
            vocab_size=spec.vocab_size,
            slots=config.max_rows + 1,  # the last one is of idle rows
            max_length=max_length,
            max_drafts=drafts,
            trees=trees,
            batch_invariant=config.batch_invariant,
            dtype=dtype,
        ),
        scheduler=SchedulerNeed(
            max_rows=config.max_rows,
            max_step_tokens=choose_step_tokens(config, device),
            max_queue=config.max_queue,
            max_length=max_length,
            depth=choose_depth(config, device),
            decode_width=1 + drafts,
        ),
    )


def choose_step_tokens(config: EngineConfig, device: DeviceFacts) -> int:
    """A GPU computes many tokens at once for little more than their share: fewer steps hold rows that decode up. They
    wait longer for each, which is why the objective `latency` has shorter ones."""
    if isinstance(config.max_step_tokens, int):
        return config.max_step_tokens
    return 8192 if device.type == "cuda" and config.objective != "latency" else 2048


def choose_depth(config: EngineConfig, device: DeviceFacts) -> int:
    """Steps that fly: on CPU the host is the device, so nothing is gained by default."""
    if isinstance(config.run_ahead, int):
        return config.run_ahead
    return 1 if device.type == "cuda" else 0
