"""Parts that say that they can be recorded, for tests of padded steps on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from pegboard.contracts.attention import AttentionLayer, LayerCache
from pegboard.contracts.batch import Rows
from pegboard.contracts.part import Part
from pegboard.ops import TorchOps
from pegboard.registry.hookspecs import hookimpl
from pegboard_attention.torch_backend import TorchAttention


class RecordableOps(TorchOps):
    capturable = True


class RecordableAttention(TorchAttention):
    """The torch part wants to know how long queries are; this one looks, as no part of a recorded step may."""

    capturable = True

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> Any:
        queries = rows.query_start.diff().tolist()
        own = replace(rows.bounds, tokens=sum(queries), max_query=max(queries), min_query=min(queries))
        return super().plan(replace(rows, bounds=own), layer, workspace)

    def forward(self, q: Tensor, k: Any, v: Any, cache: LayerCache, plan: Any, sinks: Tensor | None = None) -> Tensor:
        count = plan.rows.bounds.tokens
        nobody = torch.full_like(q[count:], float("nan"))
        return torch.cat((super().forward(q[:count], k[:count], v[:count], cache, plan, sinks), nobody))


class Padding:
    """A plugin: parts by role, all called "padding", and others."""

    def __init__(self, others: Sequence[Part] = (), **parts: type) -> None:
        self._others, self._parts = others, {"ops": RecordableOps, "attention": RecordableAttention} | parts

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        own = [Part(role=role, name="padding", factory=part, summary="for tests") for role, part in self._parts.items()]  # type: ignore[arg-type]
        return [*own, *self._others]


@pytest.fixture
def padding() -> type[Padding]:
    return Padding
