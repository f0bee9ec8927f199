"""An attention backend with its reference beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from pegboard.contracts.attention import AttentionBackend, AttentionLayer, LayerCache
from pegboard.contracts.batch import Rows
from pegboard.contracts.device import TensorSpec
from pegboard.runner.attending import Phase

from .log import ShadowLog


class BesideAttention(AttentionBackend[tuple[Any, Any]]):
    """Used in steps that are compared; made from two backends that exist, never by name."""

    def __init__(
        self,
        part: str,
        main: AttentionBackend[Any],
        reference: AttentionBackend[Any],
        log: ShadowLog,
        layers: Mapping[int, int],
        device: str,
    ) -> None:
        """`layers`: id of a layer's cache -> its number."""
        self._part, self._main, self._log, self._layers = part, main, log, layers
        self._reference = Phase(reference, device)

    @classmethod
    def refusals(cls, need: Any, options: Any) -> Sequence[str]:
        return ["is made by shadow mode only"]

    @classmethod
    def create(cls, need: Any, options: Any) -> NoReturn:
        raise NotImplementedError("made by shadow mode only")

    @classmethod
    def layouts(cls, need: Any, layer: AttentionLayer, options: Any) -> NoReturn:
        raise NotImplementedError("made by shadow mode only")

    def workspace(self) -> Sequence[TensorSpec]:
        return self._main.workspace()

    def plan(self, rows: Rows, layer: AttentionLayer, workspace: Mapping[str, Tensor]) -> tuple[Any, Any]:
        reference = self._reference
        beside = self._log.run(self._part, lambda: reference.backend.plan(rows, layer, reference.workspace))
        return self._main.plan(rows, layer, workspace), beside

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        plan: tuple[Any, Any],
        sinks: Tensor | None = None,
    ) -> Tensor:
        mine, beside = plan
        out = self._main.forward(q, k, v, cache, mine, sinks)
        backend = self._reference.backend
        expected = self._log.run(self._part, lambda: backend.forward(q, k, v, cache, beside, sinks))
        if expected is not None:
            self._log.compare(self._part, f"layer {self._layers[id(cache)]}", out, expected)
        return out
