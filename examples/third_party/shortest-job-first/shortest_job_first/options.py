from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """What a config may say under `scheduler.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: What a token of output costs, in tokens of prompt: those are computed many at a time.
    output_cost: float = Field(default=8.0, ge=0)
    #: How much of a job's cost a second of waiting outweighs. 0: long jobs may wait for ever.
    ageing: float = Field(default=200.0, ge=0)
