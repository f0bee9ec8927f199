"""The runner: from a StepPlan to tokens. `LocalExecutor` is the executor of this process."""

from __future__ import annotations

from .local import LocalExecutor

__all__ = ["LocalExecutor"]
