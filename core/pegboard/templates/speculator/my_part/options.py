from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a config may say under the speculator's `options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Drafts a row at most.
    drafts: int = Field(default=4, ge=1, le=32)
