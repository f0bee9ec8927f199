"""Options of the first-party speculators."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class NGramOptions(BaseModel):
    """Options of the part `ngram`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Drafts a row at most.
    drafts: int = Field(default=6, ge=1, le=62)
    #: Fewest last tokens that must have come before.
    min_n: int = Field(default=2, ge=1)
    #: Most last tokens that are compared.
    max_n: int = Field(default=4, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n is {self.min_n}, must not exceed max_n, {self.max_n}")
        return self
