"""Torch reference of every op. Plugins subclass `TorchOps` and replace what they are faster at."""

from __future__ import annotations

from .torch_ops import TorchOps

__all__ = ["TorchOps"]
