"""Plugin objects by their import paths, so that another process finds the same ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from .errors import PluginError


def locate_objects(plugins: Sequence[object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """("module" or "module:attribute" of each, why the rest can't be imported elsewhere)"""
    found, reasons = [], []
    for plugin in plugins:
        path = _path(plugin)
        if path is None:
            reasons.append(
                f"plugin {plugin!r} was passed as an object that no module holds by name: make it a module, or a "
                "module-level object of an importable module"
            )
        else:
            found.append(path)
    return tuple(found), tuple(reasons)


def _path(plugin: object) -> str | None:
    if isinstance(plugin, ModuleType):
        return None if plugin.__name__ == "__main__" else plugin.__name__
    module = sys.modules.get(type(plugin).__module__ if not isinstance(plugin, type) else plugin.__module__)
    if module is None or module.__name__ == "__main__":
        return None
    for name, value in vars(module).items():
        if value is plugin:
            return f"{module.__name__}:{name}"
    return None


def import_objects(paths: Sequence[str]) -> list[object]:
    """PluginError: one is not there."""
    found: list[object] = []
    for path in paths:
        module, _, name = path.partition(":")
        try:
            holder = importlib.import_module(module)
            found.append(getattr(holder, name) if name else holder)
        except (ImportError, AttributeError) as error:
            raise PluginError(f"the plan needs plugin {path!r}, which can't be imported here: {error}") from error
    return found
