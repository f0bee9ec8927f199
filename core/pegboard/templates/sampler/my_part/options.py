from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a config may say under `sampler.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Drop tokens whose logit is more than this many standard deviations below the best one; None: off.
    sigma: float | None = Field(default=None, gt=0)
