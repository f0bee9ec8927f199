"""Options of the part `flash_attention_2`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

KernelName = Literal["auto", "hopper", "portable"]


class FlashAttention2Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    #: "hopper": wgmma and bulk copies, on compute capability 9.x; "portable": plain Triton; "auto": the first of them
    #: that serves the layer.
    kernel: KernelName = "auto"
