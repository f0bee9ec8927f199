"""Weights that are drawn instead of read, for benchmarks of a model's shape. What such a model says means nothing."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor

from pegboard.contracts.checkpoint import Checkpoint, TensorInfo, TokenizerFiles
from pegboard.dtypes import FLOAT_DTYPES, element_bytes
from pegboard.errors import CheckpointError
from pegboard.shapes import SCHEME, read_shape

from .narrowing import find_tensor, resolve_range, torch_dtype

_SPREAD = 0.02


class RandomCheckpoint(Checkpoint):
    """`random:SHAPE`, see `pegboard.shapes`: dense tensors of a built-in architecture, and no tokenizer.

    A tensor is drawn on the device that asks for it, in float32 from a normal distribution of the config's
    `initializer_range`, and then rounded; weights of norms are 1. The seed is made of the tensor's name: the same
    numbers come again on the same kind of device, in every dtype and in every rank.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = read_shape(path)
        if self._config.get("quantization_config"):
            raise CheckpointError(
                f"{path}: random weights are dense, but the config has a quantization_config: leave it out, and choose "
                "a quantizer that packs dense weights when they are loaded"
            )
        stored = str(self._config.get("dtype") or self._config.get("torch_dtype") or "float32")
        self._stored = stored.removeprefix("torch.")
        if self._stored not in FLOAT_DTYPES:
            raise CheckpointError(f"{path}: dtype is {stored!r}, must be one of {', '.join(FLOAT_DTYPES)}")
        self._spread = float(self._config.get("initializer_range") or _SPREAD)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return str(path).startswith(SCHEME)

    @classmethod
    def open(cls, path: Path) -> Self:
        return cls(path)

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def generation(self) -> Mapping[str, Any]:
        return {}

    @property
    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles()

    def tensors(self) -> Mapping[str, TensorInfo]:
        """CheckpointError: what tensors the architecture has is not known here."""
        return self._infos

    @cached_property
    def _infos(self) -> Mapping[str, TensorInfo]:
        size = element_bytes(self._stored)
        return {
            name: TensorInfo(name=name, shape=shape, storage=self._stored, nbytes=math.prod(shape) * size)
            for name, shape in _shapes(self._config, self._path).items()
        }

    def read(
        self,
        name: str,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        dim: int = 0,
        start: int = 0,
        length: int | None = None,
    ) -> Tensor:
        info = find_tensor(self._infos, name, self._path)
        dim, start, length = resolve_range(info, dim, start, length)
        if "norm" in name and name.endswith(".weight"):
            values = torch.ones(info.shape, device=device)
        else:
            generator = torch.Generator(device).manual_seed(crc32(name.encode()))
            values = torch.empty(info.shape, device=device).normal_(0, self._spread, generator=generator)
        # A part of it must not keep the whole alive.
        part = values if length == info.shape[dim] else values.narrow(dim, start, length).clone()
        return part.to(torch_dtype(dtype or self._stored))

    def close(self) -> None:
        pass


def _shapes(config: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    from pegboard.builtin import pegboard_parts

    models = {name: part.factory for part in pegboard_parts() if part.role == "model" for name in part.matches}
    named = config.get("architectures") or [None]
    factory = models.get(named[0])
    if not isinstance(factory, str):
        raise CheckpointError(
            f"{path}: random weights are made for the core's own architectures ({', '.join(models)}), not {named[0]}"
        )
    module, _, attribute = factory.partition(":")
    layout = getattr(importlib.import_module(module), attribute).layout(config)
    shapes: dict[str, tuple[int, ...]] = dict(layout.vectors())
    for spec in layout.linears():
        for source, rows in zip(spec.sources, spec.out_features, strict=True):
            shapes[f"{source}.weight"] = (rows, spec.in_features)
            if spec.bias:
                shapes[f"{source}.bias"] = (rows,)
    return shapes
