from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a config may say under `cache.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Pages of each cache group at most, whatever the budget; None: as many as it pays for.
    max_pages: int | None = Field(default=None, ge=1)
