"""Finding plugins: entry points of the group "pegboard", and objects passed directly.

Each plugin is registered in a plugin manager of its own and checked there, so nothing that one does can reach
another. Its parts are taken all together or not at all.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib import metadata
from types import FunctionType
from typing import Any, Final

import msgspec
import pluggy

from ..contracts.part import Part
from ..errors import ConfigError
from .descriptors import descriptor_problems, parts_of
from .hookspecs import PROJECT, PluginSpec
from .options import nearest
from .parts import BrokenPlugin, RegisteredPart, normalized, source_text

logger = logging.getLogger("pegboard")

GROUP: Final = "pegboard"
#: A manifest that takes longer than this to import is reported.
SLOW_SECONDS: Final = 1.0
#: What a manifest must not import.
HEAVY: Final = ("torch", "triton")


class Found(msgspec.Struct, frozen=True):
    """Everything that discovery learnt."""

    parts: tuple[RegisteredPart, ...]
    broken: tuple[BrokenPlugin, ...]


class _Source(msgspec.Struct, frozen=True):
    """One plugin before it is opened."""

    plugin: str
    distribution: str | None
    version: str | None
    load: Callable[[], Any]


def discover(plugins: Sequence[object] = (), *, entry_points: bool | Collection[str] = True) -> Found:
    """Open every plugin: the installed ones, or only those of the distributions that `entry_points` names, and
    `plugins`. Raises for nothing that a plugin does, KeyboardInterrupt excepted. ConfigError: `plugins` are none."""
    _refuse_others(plugins)
    parts: list[RegisteredPart] = []
    broken: list[BrokenPlugin] = []
    for source in _sources(plugins, entry_points, broken):
        opened = _open(source)
        if isinstance(opened, BrokenPlugin):
            broken.append(opened)
        else:
            parts.extend(
                RegisteredPart(
                    part=part, plugin=source.plugin, distribution=source.distribution, version=source.version
                )
                for part in opened
            )
    return Found(tuple(parts), tuple(broken))


def _refuse_others(plugins: Sequence[object]) -> None:
    """What was meant for a list of plugin objects."""
    if not isinstance(plugins, list | tuple):
        raise ConfigError(f"plugins is {type(plugins).__name__}, must be a list of plugin objects: [plugin]")
    if len({id(plugin) for plugin in plugins}) < len(plugins):
        raise ConfigError("plugins holds one object twice: name it once")
    for plugin in plugins:
        if isinstance(plugin, str):
            raise ConfigError(f"plugins holds the text {plugin!r}: import the module and put that in")
        if isinstance(plugin, type) and isinstance(vars(plugin).get("pegboard_parts"), FunctionType):
            name = plugin.__name__
            raise ConfigError(f"plugins holds the class {name}: put in an instance of it, {name}()")


def _sources(
    plugins: Sequence[object], entry_points: bool | Collection[str], broken: list[BrokenPlugin]
) -> Iterator[_Source]:
    if entry_points:
        only = None if entry_points is True else frozenset(map(normalized, entry_points))
        for name in _distributions_with_plugins():
            if only is not None and normalized(name) not in only:
                continue
            try:
                distribution = metadata.distribution(name)
                version = distribution.version
                found = sorted(distribution.entry_points.select(group=GROUP), key=lambda point: point.name)
            except Exception as error:
                broken.append(
                    BrokenPlugin(
                        plugin=name,
                        distribution=name,
                        version=None,
                        reason=f"the distribution's metadata can't be read: {type(error).__name__}: {error}",
                        traceback=traceback.format_exc(),
                    )
                )
                continue
            for point in found:
                yield _Source(point.name, name, version, point.load)
    for plugin in plugins:
        name = getattr(plugin, "__name__", None) or type(plugin).__qualname__
        yield _Source(str(name), None, None, partial(_same, plugin))


def _same(plugin: object) -> object:
    return plugin


def _distributions_with_plugins() -> list[str]:
    """Names of the distributions that declare the group, each once, pegboard's own first.

    The text is looked at before anything is parsed: damaged metadata of an unrelated distribution is none of our
    business, and reading hundreds of METADATA files would take longer than all the rest."""
    names: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if any(line.strip() == f"[{GROUP}]" for line in text.splitlines()):
                name = distribution.name
                names.setdefault(normalized(name), name)
        except Exception as error:  # nameless or undecodable: it can't be attributed to anybody
            logger.warning("damaged metadata of an installed distribution: %s: %s", type(error).__name__, error)
    return sorted(names.values(), key=lambda name: (normalized(name) != PROJECT, normalized(name)))


def _open(source: _Source) -> tuple[Part, ...] | BrokenPlugin:
    parts: tuple[Part, ...] = ()
    trace = ""
    try:
        plugin = _timed(source)
        parts = parts_of(_call(plugin, source.plugin))
        problems = descriptor_problems(
            parts,
            source_text(source.plugin, source.distribution, source.version),
            packaged=source.distribution is not None,
        )
    except KeyboardInterrupt:
        raise
    except _Misuse as error:
        problems = [str(error)]
    except BaseException as error:  # a manifest that calls sys.exit() must not end the process
        problems = [f"{type(error).__name__}: {error}"]
        trace = traceback.format_exc()
    if not problems:
        return parts
    return BrokenPlugin(
        plugin=source.plugin,
        distribution=source.distribution,
        version=source.version,
        reason="; ".join(problems),
        traceback=trace,
        parts=tuple((str(part.role), str(part.name)) for part in parts),
    )


class _Misuse(Exception):
    """The plugin did not raise, but its hooks are not as they should be."""


def _timed(source: _Source) -> Any:
    before = set(HEAVY) & sys.modules.keys()
    start = time.perf_counter()
    plugin = source.load()
    seconds = time.perf_counter() - start
    who = source_text(source.plugin, source.distribution, source.version)
    if seconds > SLOW_SECONDS:
        logger.warning("the manifest of %s took %.1f s to import; it must be light", who, seconds)
    heavy = (set(HEAVY) & sys.modules.keys()) - before
    if heavy:
        logger.warning("the manifest of %s imports %s; it must be light", who, " and ".join(sorted(heavy)))
    return plugin


def _call(plugin: object, name: str) -> object:
    """What the plugin's `pegboard_parts` returns, after its hooks were checked."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(PluginSpec)
    known = [hook for hook in vars(PluginSpec) if hook.startswith(f"{PROJECT}_")]
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = [hook for hook in vars(manager.hook) if not hook.startswith("_") and hook not in known]
        hints = [f"{hook!r}{nearest(hook, known)}" for hook in unknown]
        detail = (
            f"unknown hook {', '.join(hints)} (hooks of a plugin: {', '.join(known)})"
            if hints
            else " ".join(str(error).split())
        )
        raise _Misuse(detail) from error
    if not manager.hook.pegboard_parts.get_hookimpls():
        raise _Misuse("no function pegboard_parts marked with pegboard.hookimpl")
    returned = manager.hook.pegboard_parts()
    if not returned:
        raise _Misuse("pegboard_parts returned None, not a list or tuple of Part")
    return returned[0]
