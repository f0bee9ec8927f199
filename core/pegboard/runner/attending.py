"""Calls the attention backends: one plan a step for each distinct layer of each group, decode and prefill apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, LayerCache, StateLayer
from pegboard.contracts.batch import Batch, Rows
from pegboard.errors import PluginError


class Phase:
    """One backend with its workspace."""

    def __init__(self, backend: AttentionBackend[Any], device: str) -> None:
        from pegboard.dtypes import torch_dtype

        self.backend = backend
        self.workspace: Mapping[str, Tensor] = {
            spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            for spec in backend.workspace()
        }

    def plans(self, rows: tuple[Rows, ...], keys: Sequence[tuple[int, AttentionLayer]]) -> dict[Any, Any]:
        return {key: self.backend.plan(rows[key[0]], key[1], self.workspace) for key in keys}


class Attending:
    """Layer index -> mixed values. `begin` is called once a step; then the model calls the object once a layer."""

    def __init__(
        self,
        prefill: Phase,
        decode: Phase,
        layers: Sequence[AttentionLayer | StateLayer],
        caches: Sequence[LayerCache],
    ) -> None:
        self._prefill, self._decode, self._caches = prefill, decode, caches
        self._keys = [
            (cache.group, layer) if isinstance(layer, AttentionLayer) else None
            for layer, cache in zip(layers, caches, strict=True)
        ]
        self._distinct = list(dict.fromkeys(key for key in self._keys if key is not None))
        self._decode_plans: dict[Any, Any] | None = None
        self._prefill_plans: dict[Any, Any] | None = None
        self._split = 0

    @property
    def workspace_bytes(self) -> int:
        return sum(t.nbytes for phase in (self._prefill, self._decode) for t in phase.workspace.values())

    def begin(self, batch: Batch) -> None:
        self._split = batch.decode_tokens
        self._decode_plans = self._decode.plans(batch.decode, self._distinct) if batch.decode else None
        self._prefill_plans = self._prefill.plans(batch.prefill, self._distinct) if batch.prefill else None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        key, cache, split = self._keys[layer], self._caches[layer], self._split
        if self._prefill_plans is None:
            assert self._decode_plans is not None  # a step has rows
            return _whole(self._decode.backend.forward(q, k, v, cache, self._decode_plans[key], sinks), q)
        if self._decode_plans is None:
            return _whole(self._prefill.backend.forward(q, k, v, cache, self._prefill_plans[key], sinks), q)
        early = (q[:split], None if k is None else k[:split], None if v is None else v[:split])
        late = (q[split:], None if k is None else k[split:], None if v is None else v[split:])
        decoded = self._decode.backend.forward(*early, cache, self._decode_plans[key], sinks)
        filled = self._prefill.backend.forward(*late, cache, self._prefill_plans[key], sinks)
        return _whole(torch.cat((decoded, filled)), q)


def _whole(mixed: Tensor, q: Tensor) -> Tensor:
    """Another shape might broadcast on its way through the model, and give wrong tokens without a word."""
    if mixed.shape != q.shape:
        raise PluginError(f"the attention backend's forward returned {list(mixed.shape)} for q {list(q.shape)}")
    return mixed
