"""What an engine is made of, as data: the assembly plan, from which the same parts are found again elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec

from .contracts.cache import CacheGroup
from .contracts.device import DeviceFacts
from .errors import ConfigError
from .memory import MemoryPlan


class ChosenPart(msgspec.Struct, frozen=True, kw_only=True):
    """A winner, by what a registry elsewhere needs to find the same one."""

    name: str
    plugin: str
    distribution: str | None
    version: str | None
    options: dict[str, Any] = {}


class AssemblyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided. `msgspec.json` encodes and decodes it."""

    config: dict[str, Any]
    #: File or folder.
    model: str
    device: DeviceFacts
    dtype: str
    #: By the config's field: attention, decode_attention, cache, ..., and model, checkpoint.
    parts: dict[str, ChosenPart]
    groups: tuple[CacheGroup, ...]
    #: Pages to allocate a group.
    pages: tuple[int, ...]
    #: Entries a page.
    page_size: int
    max_length: int
    #: What max_length would be if the cache were large enough.
    wanted_length: int
    #: Longest sequence that the whole cache holds.
    capacity: int
    #: Ids from here on are never chosen.
    vocab_limit: int
    #: Steps that may run ahead of the host.
    depth: int
    memory: MemoryPlan
    #: Plugin objects that were passed to the engine, as "module" or "module:attribute".
    objects: tuple[str, ...] = ()
    #: Why the plan can't be rebuilt in another process; empty: it can.
    unportable: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """For another process. ConfigError when a plugin object can't be imported there."""
        if self.unportable:
            raise ConfigError("the plan can't be rebuilt in another process", self.unportable)
        return msgspec.json.encode(self)
