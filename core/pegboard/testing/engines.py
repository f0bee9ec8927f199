"""An engine that does not see what else is installed: a test of a plugin or of an app must not depend on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pegboard.engine import Engine
from pegboard.errors import PluginError
from pegboard.registry.parts import normalized
from pegboard.registry.registry import Registry

#: The distribution whose parts are always seen.
PEGBOARD: Final = "pegboard"


def isolated_registry(plugins: Sequence[object] = ()) -> Registry:
    """Pegboard's own parts and those of `plugins`: plugin objects, and names of installed distributions.

    PluginError: no distribution of that name is installed and offers plugins."""
    objects = [plugin for plugin in plugins if not isinstance(plugin, str)]
    names = [plugin for plugin in plugins if isinstance(plugin, str)]
    registry = Registry.discover(objects, entry_points=(PEGBOARD, *names))
    found = {normalized(name) for name in registry.distributions}
    missing = [name for name in names if normalized(name) not in found]
    if missing:
        raise PluginError(f"no installed distribution {' or '.join(map(repr, missing))} offers plugins")
    return registry


class IsolatedEngine(Engine):
    """An Engine whose `plugins` are all that it sees beside Pegboard's own parts. Those that are named as
    distributions may be chosen automatically, as if `plugins.allow` listed them."""

    def __init__(self, model: str | Path | None = None, *, plugins: Sequence[object] = (), **settings: Any) -> None:
        """`plugins`: plugin objects, and names of installed distributions. `settings` as for Engine.

        PluginError: a distribution that is not installed; else as Engine."""
        self._registry = isolated_registry(plugins)
        names = [plugin for plugin in plugins if isinstance(plugin, str)]
        if names:
            settings.setdefault("plugins.allow", names)
        super().__init__(model, plugins=[plugin for plugin in plugins if not isinstance(plugin, str)], **settings)

    def _discover(self, plugins: Sequence[object]) -> Registry:
        return self._registry


@contextlib.contextmanager
def isolated_engine(
    model: str | Path | None = None, *, plugins: Sequence[object] = (), device: str = "cpu", **settings: Any
) -> Iterator[Engine]:
    """An IsolatedEngine, closed at the end. `settings` are those of Engine.

    >>> with isolated_engine(path, plugins=[my_plugin], scheduler="mine") as engine:  # doctest: +SKIP
    ...     engine.generate([[1, 2, 3]])
    """
    engine = IsolatedEngine(model, plugins=plugins, device=device, **settings)
    try:
        yield engine
    finally:
        engine.close()
