"""Which modules of a checkpoint are stored how, and the checking of what a config says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from pegboard.errors import ConfigError

from .layout import Layout


class Scheme(Protocol):
    def layout(self, source: str) -> Layout | None:
        """How the matrix of that name is stored; None: dense."""
        ...


class Skipping(msgspec.Struct, frozen=True):
    """One layout for all modules but some: those are named by whole components, "mlp.gate" is no "mlp.gate_proj"."""

    stored: Layout
    skipped: tuple[str, ...]

    def layout(self, source: str) -> Layout | None:
        return None if skips(self.skipped, source) else self.stored


def skips(entries: Sequence[str], source: str) -> bool:
    return any(f".{entry.strip('.')}." in f".{source}." for entry in entries)


class Fields:
    """Reads a table of a config and collects what can't be served."""

    def __init__(self, where: str, config: Mapping[str, Any], outer: Fields | None = None) -> None:
        self._where, self._config = where, config
        self._problems: list[str] = [] if outer is None else outer._problems

    def problem(self, text: str) -> None:
        self._problems.append(text)

    def choice(self, names: Sequence[str], default: Any, known: Sequence[Any], right: str, called: str = "") -> Any:
        """The first of these fields that is there, or the default; what is not known is a problem, and the first
        known value stands for it."""
        found = self._given(names, default)
        if not any(found == value and type(found) is type(value) for value in known):
            shown = ", ".join(repr(value) for value in known)
            self.problem(f"{self._where}: {called or names[0]} is {found!r}, known is {shown}: {right}")
            return known[0]
        return found

    def group(self, names: Sequence[str], default: int) -> int:
        """Columns a group: a positive number, or -1."""
        found = self._given(names, default)
        if not isinstance(found, int) or isinstance(found, bool) or (found < 1 and found != -1):
            self.problem(f"{self._where}: {names[0]} is {found!r}, must be a number of columns, or -1 for all of them")
            return -1
        return found

    def _given(self, names: Sequence[str], default: Any) -> Any:
        """null says as little as nothing."""
        return next((self._config[name] for name in names if self._config.get(name) is not None), default)

    def names(self, name: str) -> tuple[str, ...]:
        found = self._config.get(name) or ()
        if not isinstance(found, list | tuple) or not all(isinstance(entry, str) for entry in found):
            self.problem(f"{self._where}: {name} is {found!r}, must be a list of module names")
            return ()
        return tuple(found)

    def finish(self) -> None:
        if self._problems:
            raise ConfigError(f"this {self._where} checkpoint can't be read", self._problems)


def fields_of(method: str, config: Mapping[str, Any]) -> Fields:
    """ConfigError: the config is of another scheme."""
    given = config.get("quant_method")
    if given != method:
        told = "dense" if not config else f"quantized with {given!r}"
        raise ConfigError(f"reads checkpoints of quant_method {method!r}; this one is {told}")
    return Fields(method, config)
