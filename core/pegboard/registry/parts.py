"""Records of what discovery found: parts ready to be chosen, and plugins that are not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from ..contracts.part import Part
from ..errors import ConfigError, PegboardError, PluginError
from . import interfaces
from .options import nearest, validate

FIRST_PARTY: Final = "pegboard"


def normalized(distribution: str) -> str:
    """Distribution names compare without case, and with '-', '_' and '.' alike."""
    return distribution.lower().replace("_", "-").replace(".", "-")


def source_text(plugin: str, distribution: str | None, version: str | None) -> str:
    """Who offers something, for messages."""
    if distribution is None:
        return f"plugin {plugin!r} (an object passed to the engine)"
    return f"plugin {plugin!r} of distribution {distribution}{f' {version}' if version else ''}"


class BrokenPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin of which nothing was registered. Harmless to every config that doesn't need it."""

    plugin: str
    #: None: an object passed to the engine.
    distribution: str | None
    version: str | None
    reason: str
    #: Traceback text when something raised, else "".
    traceback: str = ""
    #: (role, name) of the parts that it declared, as far as that was learnt.
    parts: tuple[tuple[str, str], ...] = ()

    @property
    def source(self) -> str:
        return source_text(self.plugin, self.distribution, self.version)


class RegisteredPart(msgspec.Struct, frozen=True, kw_only=True):
    """A descriptor and where it came from."""

    part: Part
    plugin: str
    #: None: an object passed to the engine.
    distribution: str | None
    version: str | None

    @property
    def source(self) -> str:
        return source_text(self.plugin, self.distribution, self.version)

    @property
    def first_party(self) -> bool:
        """Comes with pegboard itself."""
        return self.distribution is not None and normalized(self.distribution) == FIRST_PARTY

    def allowed(self, allow: Sequence[str]) -> bool:
        """Whether the automatic choice may take it: first-party parts, objects passed to the engine, and the
        distributions in `allow`."""
        if self.distribution is None or self.first_party:
            return True
        return normalized(self.distribution) in {normalized(name) for name in allow}

    def load(self) -> Any:
        """The factory, imported now. PluginError naming the plugin when the import fails (cause chained), or when
        what is found there lacks methods of the role's contract, or has some that can't be called as it says."""
        factory = self._imported(self.part.factory, "factory")
        problems = interfaces.load_problems(self.part.role, factory)
        if problems:
            raise PluginError(f"{self._subject}: {self.part.factory} is no {self.part.role}: {'; '.join(problems)}")
        return factory

    def options_model(self) -> type[BaseModel] | None:
        """The part's options model, imported now; None: it takes no options. PluginError when it can't be imported,
        is no pydantic model, or would let unknown keys pass."""
        if self.part.options is None:
            return None
        model = self._imported(self.part.options, "options model")
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginError(f"{self._subject}: options {self.part.options} is no pydantic model")
        if model.model_config.get("extra") != "forbid":
            raise PluginError(f'{self._subject}: options model {model.__name__} must be declared with extra="forbid"')
        return model

    def options(self, values: Mapping[str, Any], where: str | None = None) -> BaseModel | None:
        """`values` as the part's own options, defaults filled in; None when it takes none.

        `where` is the path of the options in the config, by default "<role>.options". ConfigError with every
        problem, PluginError when the model itself is at fault."""
        where = f"{self.part.role}.options" if where is None else where
        model = self.options_model()
        if model is not None:
            try:
                return validate(model, values, where)
            except ConfigError:
                raise
            except Exception as error:  # a validator with a bug; pydantic passes on all but ValueError
                raise PluginError(
                    f"{self._subject}: options model {model.__name__} raised {type(error).__name__}: {error}"
                ) from error
        if values:
            reasons = [f"{where}.{key}: {self.part.role} part {self.part.name!r} takes no options" for key in values]
            raise ConfigError(f"{where} is not valid", reasons)
        return None

    def create(self, need: Any, options: Any, **extra: Any) -> Any:
        """What the factory makes. PluginError naming the plugin when `create` raises (cause chained), or returns
        something that lacks methods of the role's contract."""
        factory = self.load()
        if self.part.role == "executor":  # it makes the other parts and loads the weights: what they raise is not its
            made = factory.create(need, options, **extra)
        else:
            with self.blamed("create"):
                made = factory.create(need, options, **extra)
        lacking = interfaces.made_problems(self.part.role, made)
        if lacking:
            raise PluginError(
                f"{self._subject}: create returned {type(made).__name__}, which is no {self.part.role}: it lacks "
                f"{', '.join(lacking)}"
            )
        return made

    @contextmanager
    def blamed(self, method: str) -> Iterator[None]:
        """Say whose `method` it was that raised. Errors that say so themselves, pegboard's own, pass."""
        try:
            yield
        except (PegboardError, KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # sys.exit() in a plugin must not end the process
            raise PluginError(f"{self._subject}: {method} raised {type(error).__name__}: {error}") from error

    @property
    def _subject(self) -> str:
        return f"{self.part.role} part {self.part.name!r} of {self.source}"

    def _imported(self, target: Any, what: str) -> Any:
        if not isinstance(target, str):
            return target
        module_name, _, attributes = target.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin that calls sys.exit() at import is broken, too
            raise PluginError(
                f"{self._subject}: {what} {target} can't be imported: {type(error).__name__}: {error}"
            ) from error
        for name in attributes.split("."):
            try:
                found = getattr(found, name)
            except AttributeError as error:
                hint = nearest(name, dir(found))
                raise PluginError(f"{self._subject}: {what} {target}: no {name!r} in {module_name}{hint}") from error
            except Exception as error:  # a module that imports lazily
                raise PluginError(
                    f"{self._subject}: {what} {target} can't be imported: {type(error).__name__}: {error}"
                ) from error
        return found
