"""Ops with their reference beside them. What is written goes into a cache of the reference's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from msgspec.structs import asdict
from torch import Tensor

from pegboard.contracts.attention import KVLayout, LayerCache
from pegboard.contracts.ops import Activation, Located, Norm, Ops, Rope, SlotTables
from pegboard.contracts.quantizer import Linear

from .log import ShadowLog


class BesideOps(Ops):
    """Used in steps that are compared; made from two parts that exist. `copy_pages` and `move_entries` move what is
    there and compute nothing: they are the main part's alone."""

    def __init__(self, main: Ops, reference: Ops, log: ShadowLog, layers: Mapping[int, int]) -> None:
        """`layers`: id of a layer's cache -> its number."""
        self._main, self._reference, self._log, self._layers = main, reference, log, layers

    @classmethod
    def refusals(cls, need: Any, options: Any) -> Sequence[str]:
        return ["is made by shadow mode only"]

    @classmethod
    def create(cls, need: Any, options: Any) -> NoReturn:
        raise NotImplementedError("made by shadow mode only")

    def writes(self, layout: KVLayout) -> bool:
        return self._main.writes(layout)

    def locate(self, slots: Tensor, advance: Tensor, tables: SlotTables, width: int) -> Located:
        out = self._main.locate(slots, advance, tables, width)
        expected = self._log.run("ops", lambda: self._reference.locate(slots, advance, tables, width))
        if expected is not None:
            for name, wanted in asdict(expected).items():
                self._log.compare("ops", f"locate, {name}", getattr(out, name), wanted)
        return out

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        return self._both("embed", self._main.embed(ids, weight), lambda: self._reference.embed(ids, weight))

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        out = self._main.norm(x, norm, residual)
        return self._both("norm", out, lambda: self._reference.norm(x, norm, residual))

    def project(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        reference, given = self._reference, None if residual is None else residual.clone()
        out = self._main.project(x, linear, norm=norm, activation=activation, residual=residual)
        return self._both(
            "project",
            out,
            lambda: reference.project(x, linear, norm=norm, activation=activation, residual=given),
        )

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        out = self._main.gated(x, activation)
        return self._both("gated", out, lambda: self._reference.gated(x, activation))

    def rope_write(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        positions: Tensor,
        rope: Rope | None,
        cache: LayerCache,
        write_index: Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out = self._main.rope_write(qkv, heads, positions, rope, cache, write_index, q_norm, k_norm)

        def run() -> tuple[tuple[Tensor, Tensor | None, Tensor | None], LayerCache]:
            own, index = _empty_like(cache, len(write_index)), torch.arange(len(write_index), device=qkv.device)
            return self._reference.rope_write(qkv, heads, positions, rope, own, index, q_norm, k_norm), own

        reference = self._log.run("ops", run)
        if reference is None:
            return out
        expected, own = reference
        where = f"rope_write, layer {self._layers[id(cache)]}"
        for name, found, wanted in zip("qkv", out, expected, strict=True):
            if found is not None and wanted is not None:
                self._log.compare("ops", f"{where}, {name}", found, wanted)
        for name, tensor in cache.tensors.items():
            if tensor.shape[1] == cache.page_size:  # one value an entry
                written, wanted = tensor.flatten(0, 1)[write_index], own.tensors[name].flatten(0, 1)[: len(write_index)]
                self._log.compare("ops", f"{where}, cached {name}", written, wanted)
        return out

    def copy_pages(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        self._main.copy_pages(cache, source, target)

    def move_entries(self, cache: LayerCache, source: Tensor, target: Tensor) -> None:
        self._main.move_entries(cache, source, target)

    def _both(self, op: str, out: Tensor, reference: Callable[[], Tensor]) -> Tensor:
        where, expected = self._log.nth(op), self._log.run("ops", reference)
        if expected is not None:
            self._log.compare("ops", where, out, expected)
        return out


def _empty_like(cache: LayerCache, entries: int) -> LayerCache:
    pages = -(-entries // cache.page_size)
    tensors = {name: t.new_zeros(pages, *t.shape[1:]) for name, t in cache.tensors.items()}
    return LayerCache(layout=cache.layout, group=cache.group, page_size=cache.page_size, tensors=tensors)
