from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a config may say under `scheduler.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Prompt tokens that a second of waiting outweighs, so that long prompts get their turn.
    ageing: float = Field(default=100.0, gt=0)
