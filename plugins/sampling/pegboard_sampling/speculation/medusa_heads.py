"""Medusa-1 heads (Cai et al. 2024): files of them, and what they compute.

Letters: k heads, b blocks of each, R rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from pegboard.contracts.checkpoint import TensorInfo
from pegboard.contracts.model import ModelSpec
from pegboard.dtypes import element_bytes

from .head_files import HeadFiles

#: What some files put before each name.
_PREFIX = "medusa_heads."


class MedusaFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder of heads holds. config.json: `medusa_num_heads`, `medusa_num_layers`. safetensors:
    `{head}.{block}.linear.weight` [E, E] and `.bias` [E]; `{head}.{blocks}.weight` [V, E] where heads have an output
    matrix of their own, which all of them have or none, and else use the target's."""

    heads: int
    blocks: int
    own: bool
    prefix: str
    #: Bytes of a stored number.
    width: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def read(cls, files: HeadFiles, target: ModelSpec) -> Self:
        """CheckpointError: what is missing, or does not fit the target."""
        heads, blocks = files.size("medusa_num_heads"), files.size("medusa_num_layers")
        prefix = _PREFIX if any(name.startswith(_PREFIX) for name in files.tensors) else ""
        outputs = [f"{prefix}{head}.{blocks}.weight" for head in range(heads)]
        own = any(name in files.tensors for name in outputs)
        size = target.hidden_size
        wanted: dict[str, tuple[int, ...]] = {}
        for head in range(heads):
            for block in range(blocks):
                wanted[f"{prefix}{head}.{block}.linear.weight"] = (size, size)
                wanted[f"{prefix}{head}.{block}.linear.bias"] = (size,)
        if own:
            wanted |= dict.fromkeys(outputs, (target.vocab_size, size))
        files.check(wanted)
        return cls(
            heads=heads,
            blocks=blocks,
            own=own,
            prefix=prefix,
            width=_width(files.tensors, wanted),
            hidden_size=size,
            vocab_size=target.vocab_size,
        )

    def nbytes(self, heads: int) -> int:
        """Of the first `heads` of them."""
        size = self.blocks * (self.hidden_size + 1) * self.hidden_size
        return heads * self.width * (size + self.own * self.vocab_size * self.hidden_size)


def _width(infos: Mapping[str, TensorInfo], wanted: Mapping[str, tuple[int, ...]]) -> int:
    return max(element_bytes(infos[name].storage) for name in wanted)


class MedusaHeads:
    """weights [k, E, E] and biases [k, 1, E] of every block; outputs [k, V, E], None: the target's are used."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor], outputs: Tensor | None) -> None:
        self.weights, self.biases, self.outputs = weights, biases, outputs

    @classmethod
    def load(cls, path: Path, target: ModelSpec, heads: int, dtype: torch.dtype, device: torch.device) -> Self:
        """The first `heads` of the file."""
        with HeadFiles(path) as files:
            found = MedusaFile.read(files, target)

            def stacked(name: str) -> Tensor:
                return torch.stack([files.read(f"{found.prefix}{head}.{name}", dtype, device) for head in range(heads)])

            return cls(
                [stacked(f"{block}.linear.weight") for block in range(found.blocks)],
                [stacked(f"{block}.linear.bias")[:, None] for block in range(found.blocks)],
                stacked(f"{found.blocks}.weight") if found.own else None,
            )

    def states(self, hidden: Tensor, heads: int) -> Tensor:
        """hidden [R, E] -> [heads, R, E]: x + SiLU(W x + b), block by block."""
        x = hidden.expand(heads, *hidden.shape)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + functional.silu(torch.baddbmm(bias[:heads], x, weight[:heads].mT))
        return x
