"""Folders of trained heads: config.json and safetensors, never pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from pegboard import CheckpointError
from pegboard.checkpoints.safetensors import SafetensorsCheckpoint
from pegboard.dtypes import FLOAT_DTYPES, dtype_name


class HeadFiles:
    """One folder, open. CheckpointError: it isn't one, or lacks something."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path} is no folder; heads are a config.json and a safetensors file in a folder")
        self.path = path
        self._checkpoint = SafetensorsCheckpoint.open(path)
        self.tensors = self._checkpoint.tensors()

    @property
    def config(self) -> Mapping[str, Any]:
        return self._checkpoint.config

    def size(self, field: str) -> int:
        """A field of config.json that counts something."""
        value = self.config.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{field} is {value!r} in {self.path / 'config.json'}, must be 1 or more")
        return value

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Names -> shapes. CheckpointError names all that is missing, or of another shape or kind."""
        problems = []
        for name, shape in wanted.items():
            info = self.tensors.get(name)
            if info is None:
                problems.append(f"missing tensor {name}")
            elif info.shape != shape:
                problems.append(f"tensor {name} has shape {info.shape}, for this target it must have {shape}")
            elif info.storage not in FLOAT_DTYPES:
                problems.append(f"tensor {name} is stored as {info.storage}, must be one of {', '.join(FLOAT_DTYPES)}")
        if problems:
            raise CheckpointError(f"{self.path} does not fit:\n  - " + "\n  - ".join(problems))

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._checkpoint.read(name, dtype=dtype_name(dtype), device=str(device))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._checkpoint.close()
