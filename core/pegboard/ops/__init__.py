"""Torch reference of every op. Plugins subclass `TorchOps` and replace what they are faster at."""

from __future__ import annotations

from .torch_ops import TorchOps, as_indexable, check_width

__all__ = ["TorchOps", "as_indexable", "check_width"]
