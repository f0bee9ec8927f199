"""The memory plan: what an engine will need, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .config import EngineConfig
from .contracts.cache import CacheGroup
from .contracts.checkpoint import TensorInfo
from .contracts.device import DeviceFacts
from .contracts.model import ModelSpec
from .contracts.quantizer import Quantizer, Shard
from .contracts.speculator import SpeculatorSpec
from .dtypes import element_bytes
from .errors import ConfigError

#: Share of a CUDA device's free memory that an engine may plan for; the rest is for the allocator's gaps.
_CUDA_SHARE = 0.92
#: On CPU other programs live in the same memory.
_CPU_SHARE = 0.9
_CPU_KV_SHARE = 0.3


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device."""

    available: int
    weights: int
    #: Upper bound of what a step needs beside the cache.
    activations: int
    kv_cache: int

    def text(self) -> str:
        parts = f"weights {gib(self.weights)}, a step {gib(self.activations)}, KV cache {gib(self.kv_cache)}"
        total = self.weights + self.activations + self.kv_cache
        return f"needs {gib(total)} ({parts}), has {gib(self.available)}"


def affordable_length(groups: tuple[CacheGroup, ...], page_size: int, kv_bytes: int) -> int:
    """Entries of the longest sequence that `kv_bytes` hold, beside each group's null page."""
    states = sum(group.page_bytes for group in groups if group.kind == "state")
    page = sum(group.page_bytes for group in groups if group.kind != "state")
    return max((kv_bytes - 2 * states) // page - 1, 0) * page_size if page else 2**31


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def plan_memory(
    config: EngineConfig,
    device: DeviceFacts,
    spec: ModelSpec,
    quantizer: Quantizer,
    stored: Mapping[str, TensorInfo],
    shard: Shard,
    groups: tuple[CacheGroup, ...],
    dtype: str,
    max_length: int,
    page_size: int,
    step_tokens: int,
    speculation: SpeculatorSpec | None = None,
) -> MemoryPlan:
    """ConfigError: it does not fit, with the numbers."""
    size = element_bytes(dtype)
    weights = sum(quantizer.bytes_for(linear, stored, shard) for linear in spec.linears) + spec.other_parameters * size
    drafts = 0
    if speculation is not None:
        weights, drafts = weights + speculation.weight_bytes, speculation.drafts
    # Logits of every row and draft, and the sampler's float64 work on them.
    logits = config.max_rows * (1 + drafts) * spec.vocab_size * (size + 3 * 8)
    activations = step_tokens * spec.activation_width * size + logits
    if device.type == "cuda" and config.cuda_graphs:
        activations *= 2  # recorded steps have a pool of memory of their own
    available = int(device.free_bytes * (_CPU_SHARE if device.type == "cpu" else _CUDA_SHARE))
    left = max(available - weights - activations, 0)
    # What every row at its longest would fill.
    most = sum(
        group.page_bytes * (1 + config.max_rows * (1 if group.kind == "state" else -(-max_length // page_size)))
        for group in groups
    )
    kv = config.kv_memory_bytes(left, auto=min(most, int(left * _CPU_KV_SHARE) if device.type == "cpu" else left))
    plan = MemoryPlan(available=available, weights=weights, activations=activations, kv_cache=kv)
    if weights + activations + kv > available or kv <= 0:
        raise ConfigError(
            f"the engine does not fit on {device.name or device.type}: {plan.text()}",
            ["lower kv_memory, max_rows or max_step_tokens, use a smaller dtype, a quantized or a smaller model"],
        )
    return plan
