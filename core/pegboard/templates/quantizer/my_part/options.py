from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """What a config may say under `quantizer.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Input features that share a scale: fewer are more exact and take more memory.
    group: Literal[16, 32, 64, 128] = 32
