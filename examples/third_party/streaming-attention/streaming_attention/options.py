from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a config may say under `attention.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Entries at the beginning that every query sees.
    sinks: int = Field(default=4, ge=0)
    #: Latest entries that a query sees, its own included.
    window: int = Field(default=1024, ge=1)
