"""A checkpoint in memory that remembers what was read of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ...contracts.checkpoint import Checkpoint, TensorInfo, TokenizerFiles
from ...dtypes import dtype_name, torch_dtype
from ...errors import CheckpointError


class MemoryCheckpoint(Checkpoint):
    """`stored` holds the dense values by name. For tensors in blocks, `storages` names their type and `blocks` holds
    them as `read_blocks` gives them."""

    generation: Mapping[str, Any] = {}
    tokenizer = TokenizerFiles()

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        config: Mapping[str, Any] | None = None,
        storages: Mapping[str, str] | None = None,
        blocks: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.stored = dict(stored)
        self.storages, self.blocks = dict(storages or {}), dict(blocks or {})
        #: Names that were read so far.
        self.reads: set[str] = set()
        self._config = dict(config or {})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    @classmethod
    def open(cls, path: Path) -> Self:
        raise CheckpointError(f"{path}: a checkpoint in memory is made, not opened")

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(
                name=name,
                shape=tuple(tensor.shape),
                storage=self.storages.get(name, dtype_name(tensor.dtype)),
                nbytes=self.blocks[name].nbytes if name in self.blocks else tensor.nbytes,
            )
            for name, tensor in self.stored.items()
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
        """Without conversion a view of what is stored, as of a mapped file."""
        tensor = self._find(name)
        part = tensor.narrow(dim, start, tensor.shape[dim] - start if length is None else length)
        return part.to(torch.device(device), None if dtype is None else torch_dtype(dtype))

    def read_blocks(self, name: str) -> Tensor:
        self._find(name)
        return self.blocks[name] if name in self.blocks else super().read_blocks(name)

    def close(self) -> None: ...

    def _find(self, name: str) -> Tensor:
        self.reads.add(name)
        if name not in self.stored:
            raise CheckpointError(f"there is no tensor {name!r}; there are {', '.join(self.stored)}")
        return self.stored[name]
