"""Options of the first-party cache managers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PagedOptions(BaseModel):
    """Options of the part `paged`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Keep computed pages and attach them to later prompts that begin alike.
    prefix_reuse: bool = True
