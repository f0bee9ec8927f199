"""One hierarchy of errors. Each message says what was wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Sequence


class PegboardError(Exception):
    """Base of every error that pegboard raises on purpose."""


class ConfigError(PegboardError):
    """A config that cannot work. `reasons` holds every refusal found, not only the first."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n  - ".join([message, *self.reasons]))


class PluginError(PegboardError):
    """A plugin that is missing, broken, ambiguous, or of the wrong contract version."""


class CheckpointError(PegboardError):
    """Model files that are missing, damaged, or of a kind that is not supported."""


class InvalidRequest(PegboardError):
    """A request that can never be served; raised at submission."""


class QueueFull(PegboardError):
    """The bounded queue has no room now; the same request may be admitted later."""


class DeadlineExceeded(PegboardError):
    """The request's deadline passed before it finished."""


class RequestFailed(PegboardError):
    """A step raised while it worked on this request; the engine went on without it."""


class EngineDead(PegboardError):
    """The engine was closed or stopped after an error; it takes no more requests."""
