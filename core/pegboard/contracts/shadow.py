"""What shadow mode reports: a part beside its reference on the same inputs."""

from __future__ import annotations

import msgspec


class ShadowCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One shadowed part in one step that was compared."""

    #: "attention", "decode_attention", "ops" or "sampler".
    part: str
    #: Results compared: calls of attention and of ops, rows of the sampler.
    compared: int
    #: Those beyond the tolerance; of the sampler those with another token, too.
    differing: int
    #: Greatest absolute error.
    max_abs: float
    #: Greatest error as a multiple of what is tolerated; inf for another token.
    worst: float
    #: The first that differs, e.g. "layer 3"; "" when none does.
    first: str = ""
    #: The reference raised; the step went on without it.
    error: str | None = None


class ShadowStats(msgspec.Struct, frozen=True, kw_only=True):
    """One shadowed part since the engine was made."""

    part: str
    #: The part that it is compared with.
    reference: str
    #: Steps in which it was compared.
    steps: int = 0
    compared: int = 0
    differing: int = 0
    #: Steps in which the reference raised.
    failed: int = 0
    max_abs: float = 0.0
    worst: float = 0.0
    #: Where a difference was first seen, e.g. "step 17, layer 3".
    first: str = ""
