from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a config may say under `attention.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Cache entries that are looked at together: more is faster and takes more memory.
    block: int = Field(default=256, ge=1)
