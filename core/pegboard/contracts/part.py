"""What a plugin declares about a part, readable without importing the part.

A manifest returns these records from the hook `pegboard_parts`. The core reads them to list, choose and
explain; only the winners' factories are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

#: Role -> contract version that this core speaks. The core also accepts the version before (never below 1).
CONTRACT_VERSIONS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "attention": 1,
        "cache": 1,
        "scheduler": 1,
        "sampler": 1,
        "logits_processor": 1,
        "quantizer": 1,
        "ops": 1,
        "model": 1,
        "checkpoint": 1,
        "speculator": 1,
        "executor": 1,
        "observer": 1,
    }
)

ROLES: Final[tuple[str, ...]] = tuple(CONTRACT_VERSIONS)

#: What a config may ask the automatic choice to favour.
OBJECTIVES: Final[tuple[str, ...]] = ("latency", "throughput", "determinism", "memory")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation of one role.

    `factory` names a class (or an object with the same class methods) that follows the role's contract: it has
    `refusals(need, options)` and `create(need, options, ...)`. A string "package.module:Attribute" keeps the
    manifest free of imports; a class object is accepted from a plugin that is passed to the engine directly.
    """

    role: str
    name: str
    factory: str | Callable[..., Any]
    summary: str
    contract: int = 1
    #: "package.module:Model", a pydantic model with extra="forbid"; None: the part takes no options.
    options: str | type | None = None
    #: `auto` prefers the higher number; `objectives` adds to it per objective.
    priority: int = 0
    objectives: Mapping[str, int] = {}
    #: Import names that must be present, e.g. ("triton",); a missing one is a refusal, not an error.
    requires: tuple[str, ...] = ()
    #: The command that installs what `requires` names, for the refusal: 'pip install "pegboard[cpu]"'.
    install: str = ""
    #: Device types that the part runs on; empty: any.
    devices: tuple[str, ...] = ()
    #: What the part recognises: architectures (model), file kinds (checkpoint), schemes (quantizer).
    matches: tuple[str, ...] = ()
