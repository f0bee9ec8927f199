"""Whether a call raises what its contract says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raises(kind: type[Exception], call: Callable[[], Any], what: str) -> Exception:
    """The exception of that kind; AssertionError when the call raises another, or nothing."""
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} where {kind.__name__} is right: {error}") from error
    raise AssertionError(f"{what}: nothing was raised, {kind.__name__} is right")
