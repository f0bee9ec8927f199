"""One engine's view of the parts that are installed or were passed to it. No state outlives it, none is shared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from ..contracts.part import ROLES
from ..errors import PluginError
from .discovery import discover
from .options import listed, nearest
from .parts import BrokenPlugin, RegisteredPart, source_text

_HOW_TO_GET = "install the distribution that provides it, or pass the plugin object to the engine"


class Registry:
    """Parts by role and name."""

    def __init__(self, parts: Sequence[RegisteredPart], broken: Sequence[BrokenPlugin] = ()) -> None:
        self._by_name: dict[tuple[str, str], tuple[RegisteredPart, ...]] = {}
        for part in parts:
            key = (part.part.role, part.part.name)
            self._by_name[key] = (*self._by_name.get(key, ()), part)
        #: Plugins of which nothing was registered, and why.
        self.broken: tuple[BrokenPlugin, ...] = tuple(broken)
        #: (role, name) that more than one plugin offers, and who does. Fatal only to a config that names one.
        self.ambiguous: Mapping[tuple[str, str], tuple[RegisteredPart, ...]] = MappingProxyType(
            {key: found for key, found in self._by_name.items() if len(found) > 1}
        )

    @classmethod
    def discover(cls, plugins: Sequence[object] = (), *, entry_points: bool | Collection[str] = True) -> Self:
        """Everything installed (nothing of it if `entry_points` is off; only the distributions that it names if it is
        a collection) and `plugins`, objects that implement `pegboard_parts`.

        A misbehaving plugin is listed in `broken` and stops nothing here."""
        found = discover(plugins, entry_points=entry_points)
        return cls(found.parts, found.broken)

    @property
    def broken_objects(self) -> tuple[BrokenPlugin, ...]:
        """Broken plugins that were passed as objects: asked for by the caller, so an engine must not go on without."""
        return tuple(plugin for plugin in self.broken if plugin.distribution is None)

    @property
    def distributions(self) -> frozenset[str]:
        """Names of the distributions that offer plugins, broken ones included."""
        offering = [part.distribution for found in self._by_name.values() for part in found]
        return frozenset(name for name in [*offering, *(b.distribution for b in self.broken)] if name is not None)

    def parts(self, role: str) -> tuple[RegisteredPart, ...]:
        """All parts of a role by name, ambiguous ones included."""
        if role not in ROLES:
            raise PluginError(f"unknown role {role!r}{nearest(role, ROLES)}; roles: {', '.join(ROLES)}")
        found = [part for key, parts in self._by_name.items() if key[0] == role for part in parts]
        return tuple(sorted(found, key=lambda part: part.part.name))

    def get(self, role: str, name: str) -> RegisteredPart:
        """The part of that name. PluginError when there is none, when its plugin is broken, or when two offer it."""
        found = self._by_name.get((role, name), ())
        if len(found) == 1:
            return found[0]
        if found:
            sources = " and ".join(part.source for part in found)
            raise PluginError(f"{role} {name!r} is ambiguous: offered by {sources}; uninstall all but one of them")
        names = {part.part.name for part in self.parts(role)}
        for plugin in self.broken:
            if (role, name) in plugin.parts:
                raise PluginError(f"{role} {name!r} is offered by {plugin.source}, which is broken: {plugin.reason}")
        valid = f"valid names: {listed(names)}" if names else "none is installed"
        raise PluginError(f"no {role} named {name!r}{nearest(name, names)}; {valid}; {_HOW_TO_GET}{self._suspects()}")

    def exactly(self, role: str, name: str, plugin: str, distribution: str | None) -> RegisteredPart:
        """The part of that name from that source, as a decision or a plan recorded it, even if others that were not
        chosen use the same name. PluginError when it is not here."""
        for entry in self.parts(role):
            if (entry.part.name, entry.plugin, entry.distribution) == (name, plugin, distribution):
                return entry
        raise PluginError(
            f"no {role} named {name!r} from {source_text(plugin, distribution, None)} here; {_HOW_TO_GET}"
            f"{self._suspects()}"
        )

    def matching(self, role: str, key: str, allow: Sequence[str] = ()) -> RegisteredPart:
        """The part that recognises `key` (an architecture, a kind of checkpoint, a quantization scheme), by priority
        and name among those that the automatic choice may take. PluginError naming all supported keys."""
        parts = self.parts(role)
        matches = [part for part in parts if key in part.part.matches]
        usable = [part for part in matches if part.allowed(allow)]
        names = [part.part.name for part in usable]
        clashing = next((part for part in usable if names.count(part.part.name) > 1), None)
        if clashing is not None:
            return self.get(role, clashing.part.name)  # raises, naming both
        if usable:
            return min(usable, key=lambda part: (-part.part.priority, part.part.name))
        supported = {known for part in parts if part.allowed(allow) for known in part.part.matches}
        waiting = [
            f"{part.part.name!r} of {part.source} does, but is not allowed: add {part.distribution!r} to plugins.allow"
            for part in matches
        ]
        hint = "; ".join(waiting) or f"{_HOW_TO_GET}{self._suspects()}"
        raise PluginError(
            f"no {role} recognises {key!r}{nearest(key, supported)}; supported: {listed(supported)}; {hint}"
        )

    def _suspects(self) -> str:
        """Broken plugins whose parts are not known: one of them may be what is missing."""
        suspects = [f"{plugin.source} is broken: {plugin.reason}" for plugin in self.broken if not plugin.parts]
        return "".join(f"; {suspect}" for suspect in suspects)
