"""What a request may ask of structured output."""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Arguments(BaseModel):
    """One of the first three."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The text is JSON that this schema allows: the schema, or its text; {} for any JSON.
    json_schema: dict[str, Any] | str | None = None
    #: The whole text matches it; the syntax is that of Rust's crate regex.
    regex: str | None = Field(default=None, min_length=1)
    #: A context-free grammar in Lark's syntax, or in llama.cpp's (GBNF).
    grammar: str | None = Field(default=None, min_length=1)
    #: With json_schema: any white space that JSON allows; else one line, as Python's json.dumps writes it.
    whitespace: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of json_schema, regex and grammar, not {' and '.join(given) or 'none of them'}")
        if self.whitespace and self.json_schema is None:
            raise ValueError("whitespace goes with json_schema")
        return self

    def key(self) -> str:
        """Equal for arguments that ask for the same."""
        return json.dumps(self.model_dump(), sort_keys=True)
