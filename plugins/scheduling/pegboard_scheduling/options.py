"""Options of the first-party schedulers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ContinuousOptions(BaseModel):
    """Options of the part `continuous`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Prefill tokens of one sequence in a step at most; None: as many as the step holds.
    chunk: int | None = Field(default=None, ge=1)
    #: Share of the pages kept available for running rows when a new one is admitted.
    watermark: float = Field(default=0.01, ge=0, lt=1)
    #: Seconds of waiting that weigh as much as one level of priority; None: no ageing.
    ageing_seconds: float | None = Field(default=30.0, gt=0)


class StaticOptions(BaseModel):
    """Options of the part `static`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Sequences a batch at most; None: as many as the engine has rows.
    batch: int | None = Field(default=None, ge=1)
