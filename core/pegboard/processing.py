"""What a request asks of logits processors, from plain values to what they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .contracts.processor import LogitsProcessor
from .errors import ConfigError, InvalidRequest
from .registry.options import validate


def read_arguments(processor: LogitsProcessor, name: str, values: Mapping[str, Any]) -> BaseModel | None:
    """An instance of the processor's model. InvalidRequest: the values are not valid, with every reason."""
    if processor.arguments is None:
        if values:
            raise InvalidRequest(f"processors.{name} takes no arguments, and was given {', '.join(map(str, values))}")
        return None
    try:
        return validate(processor.arguments, values, f"processors.{name}")
    except ConfigError as error:
        raise InvalidRequest("; ".join(error.reasons)) from None
