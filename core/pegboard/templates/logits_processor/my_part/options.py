from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a config may say under the processor's `options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The greatest strength that a request may ask for.
    most: float = Field(default=10.0, gt=0)
