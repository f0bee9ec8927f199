"""Typed access to the metadata of one GGUF architecture."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

from pegboard.errors import CheckpointError


class ArchitectureKeys:
    """The metadata of one architecture, with its prefix left out."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # one number a layer, all alike
        if type(value) is not int or value < 1:
            raise self.wrong(key, "one positive integer for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number")
        return _shortest(float(value))

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        value = self.get(key)
        state = "is missing" if value is None else f"is {value!r}"
        return CheckpointError(f"GGUF key {self._prefix}.{key} {state}; expected {wanted}")


def _shortest(value: float) -> float:
    """The decimal that was meant: a float32 of 1e-5 comes back as 9.999999747378752e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if ctypes.c_float(short).value == value:
            return short
    return value
