"""Options of the first-party speculators."""

from __future__ import annotations

from typing import Literal, Self

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


class DraftModelOptions(BaseModel):
    """Options of the part `draft_model`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: A file or folder, or a name that `pegboard models` knows; it must have the target's tokenizer.
    model: str = Field(min_length=1)
    #: Drafts a row at most.
    drafts: int = Field(default=4, ge=1, le=62)
    #: Where it runs; None: beside the target.
    device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float64"] = "auto"
    #: Most probable tokens that a draft may be.
    candidates: int = Field(default=64, ge=1)


class MedusaOptions(BaseModel):
    """Options of the part `medusa`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: A folder with config.json and the heads' safetensors file.
    model: str = Field(min_length=1)
    #: Drafts a row at most, one of each head; None: all heads.
    drafts: int | None = Field(default=None, ge=1, le=62)
    #: In place of a chain a tree, by its paths (`medusa_choices` as published): [0, 2] is the third choice of the
    #: second head behind the first choice of the first. With each path all that it begins with.
    choices: tuple[tuple[int, ...], ...] | None = Field(default=None, min_length=1, max_length=62)
    #: Most probable tokens that a draft may be.
    candidates: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _whole_paths(self) -> Self:
        if self.choices is None:
            return self
        if self.drafts is not None:
            raise ValueError("choices and drafts exclude each other: a tree has as many drafts as paths")
        known = {(), *self.choices}
        if len(known) <= len(self.choices):
            raise ValueError("choices has a path twice, or an empty one")
        for path in self.choices:
            if path[:-1] not in known:
                raise ValueError(f"choices has {list(path)}, but not {list(path[:-1])} that it begins with")
            if not 0 <= path[-1] < self.candidates:
                raise ValueError(f"choices has {list(path)}: numbers are 0 to candidates - 1, {self.candidates - 1}")
        return self


class EagleOptions(BaseModel):
    """Options of the part `eagle`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: A folder with config.json and the layer's safetensors file.
    model: str = Field(min_length=1)
    #: Drafts a row at most.
    drafts: int = Field(default=4, ge=1, le=62)
    #: Most probable tokens that a draft may be.
    candidates: int = Field(default=64, ge=1)
