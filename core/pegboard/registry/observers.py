"""Telling observers of lifecycle events, so that none can hurt the engine or another."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Final

import msgspec
import pluggy

from ..contracts.observer import Observer
from ..errors import PluginError
from .hookspecs import PROJECT, ObserverSpec
from .options import nearest

logger = logging.getLogger("pegboard")

HOOKS: Final = tuple(name for name in vars(ObserverSpec) if name.startswith(f"{PROJECT}_"))


class Observers:
    """The observers of one engine. `notify` may be called from any thread."""

    def __init__(self, observers: Sequence[object] = ()) -> None:
        """PluginError for an observer with a misspelt hook, arguments that the hook doesn't have, or no hook at all."""
        self._lock = threading.Lock()
        self._active = tuple((observer, _checked(observer, type(observer).__qualname__)) for observer in observers)

    @property
    def active(self) -> tuple[object, ...]:
        """Those that are still told."""
        return tuple(observer for observer, _ in self._active)

    def notify(self, hook: str, event: msgspec.Struct | None = None) -> None:
        """Call `hook` of every observer in the order given; `event` is None for hooks without one. An observer that
        raises is logged, with its traceback, and dropped. ValueError for a hook that doesn't exist."""
        if hook not in HOOKS:
            raise ValueError(f"no hook {hook!r}{nearest(hook, HOOKS)}")
        arguments: dict[str, Any] = {} if event is None else {"event": event}
        for observer, manager in self._active:
            try:
                getattr(manager.hook, hook)(**arguments)
            except KeyboardInterrupt:
                raise
            except BaseException:  # sys.exit() in an observer must not end the step's thread
                logger.exception("observer %r raised in %s and is dropped", observer, hook)
                self._drop(observer)

    def _drop(self, observer: object) -> None:
        with self._lock:
            self._active = tuple(entry for entry in self._active if entry[0] is not observer)


def hook_problems(factory: Any) -> list[str]:
    """What an engine would refuse of the observers that `factory` makes, as far as its class tells: nothing is made.
    A factory that is no class, or one with no hooks of its own (it makes something else), tells nothing."""
    if not isinstance(factory, type):
        return []
    hooks = {}
    for name in dir(factory):
        found = inspect.getattr_static(factory, name, None)
        if isinstance(found, FunctionType):
            hooks[name] = MethodType(found, factory)  # as of an instance, so that `self` is no argument of the hook
        elif isinstance(found, classmethod | staticmethod):
            hooks[name] = getattr(factory, name)
    try:
        _checked(SimpleNamespace(**hooks), factory.__qualname__, required=issubclass(factory, Observer))
    except PluginError as error:
        return [str(error)]
    return []


def _checked(observer: object, name: str, *, required: bool = True) -> pluggy.PluginManager:
    """A manager for this observer alone: pluggy ends a call at the first that raises, and others must not feel it."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(ObserverSpec)
    try:
        manager.register(observer, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = [hook for hook in vars(manager.hook) if not hook.startswith("_") and hook not in HOOKS]
        hints = [f"unknown hook {hook!r}{nearest(hook, HOOKS)}" for hook in unknown]
        detail = "; ".join(hints) or " ".join(str(error).split())
        raise PluginError(f"observer {name}: {detail} (hooks: {', '.join(HOOKS)})") from error
    implementations = [found for hook in HOOKS for found in getattr(manager.hook, hook).get_hookimpls()]
    if required and not implementations:
        raise PluginError(f"observer {name} implements no hook; mark its methods @hookimpl (hooks: {', '.join(HOOKS)})")
    for found in implementations:
        if inspect.iscoroutinefunction(found.function):
            raise PluginError(f"observer {name}: {found.function.__name__} is async; hooks are plain functions")
    return manager
