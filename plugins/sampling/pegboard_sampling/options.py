"""Options of the first-party samplers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Verification(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    #: How drafts are verified: coupled gives the tokens that there would be without drafts; rejection accepts more of
    #: them and keeps the distribution only.
    verification: Literal["coupled", "rejection"] = "coupled"


class TorchSamplerOptions(_Verification):
    """Options of the part `torch`."""


class FusedSamplerOptions(_Verification):
    """Options of the part `fused`."""
