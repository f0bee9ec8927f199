"""The lock: which distributions a config may use, in which version and with which content. TOML, made by
`pegboard plugins lock`, required by a config that names it in `plugins.lock`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..contracts.part import CONTRACT_VERSIONS, ROLES
from ..errors import ConfigError, PluginError
from .digests import digest_of, is_editable
from .discovery import GROUP
from .parts import FIRST_PARTY, RegisteredPart, normalized
from .registry import Registry

if TYPE_CHECKING:
    from ..config import EngineConfig

_FORMAT: Final = 1
_ANEW: Final = "if that is meant, lock anew with `pegboard plugins lock`"


class LockedDistribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    version: str
    digest: str
    #: Its digest was that of an editable install.
    editable: bool = False
    #: Role -> contract version that its parts follow.
    contracts: dict[str, int] = {}


class Lock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Of this file format.
    format: int = _FORMAT
    #: Role -> contract version that the core speaks.
    contracts: dict[str, int]
    distributions: tuple[LockedDistribution, ...] = msgspec.field(name="distribution")


def make_lock(registry: Registry, config: EngineConfig | None = None) -> Lock:
    """What is installed now: the distributions that `config` may use, or all that offer plugins.

    ConfigError: the config names what isn't there."""
    if config is None:
        names: Iterable[str] = registry.distributions
    else:
        reasons: list[str] = []
        names = _usable(config, registry, reasons)
        if reasons:
            raise ConfigError("the config names what is not installed, so it can't be locked", reasons)
    locked = [_locked(name, registry) for name in sorted({normalized(name) for name in names})]
    return Lock(contracts=dict(CONTRACT_VERSIONS), distributions=tuple(locked))


def lock_text(lock: Lock) -> str:
    """The file's content."""
    lines = [
        "# Made by `pegboard plugins lock`. A config that names this file in `plugins.lock` runs with nothing else.",
        f"format = {lock.format}",
        "",
        "[contracts]",
        *(f"{role} = {version}" for role, version in lock.contracts.items()),
    ]
    for found in lock.distributions:
        contracts = ", ".join(f"{role} = {version}" for role, version in sorted(found.contracts.items()))
        lines += [
            "",
            "[[distribution]]",
            f"name = {json.dumps(found.name)}",
            f"version = {json.dumps(found.version)}",
            f"digest = {json.dumps(found.digest)}",
            f"editable = {json.dumps(found.editable)}",
            f"contracts = {{ {contracts} }}",
        ]
    return "\n".join(lines) + "\n"


def read_lock(path: Path) -> Lock:
    """ConfigError: it can't be read, or is no lock."""
    try:
        lock = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Lock)
    except (OSError, ValueError) as error:  # decoding and validation errors are ValueErrors
        hint = "make it with `pegboard plugins lock`"
        raise ConfigError(f"plugins.lock: {path} can't be read: {error}; {hint}") from error
    if lock.format != _FORMAT:
        raise ConfigError(f"plugins.lock: {path} has format {lock.format}, this pegboard reads {_FORMAT}")
    return lock


def lock_problems(config: EngineConfig, registry: Registry) -> list[str]:
    """How what `config` may use differs from its lock; nothing if it has none. Imports no part."""
    if config.plugins.lock is None:
        return []
    try:
        lock = read_lock(Path(config.plugins.lock))
    except ConfigError as error:
        return [str(error)]
    problems = [
        f"plugins.lock: the lock is for version {version} of the {role} contract, this pegboard speaks "
        f"{CONTRACT_VERSIONS.get(role, 'none')}; {_ANEW}"
        for role, version in lock.contracts.items()
        if CONTRACT_VERSIONS.get(role) != version
    ]
    problems += [
        f"plugins.lock: {entry.source} offers the {role} {entry.part.name!r}, and objects can't be locked: install it "
        "as a distribution, or leave plugins.lock out"
        for role, entry in _entries(registry)
        if entry.distribution is None
    ]
    wanted = {normalized(found.name): found for found in lock.distributions}
    absent: list[str] = []
    for name in _usable(config, registry, absent):
        if normalized(name) not in wanted:
            problems.append(
                f"plugins.lock: the config may use distribution {name}, which {config.plugins.lock} lacks; {_ANEW}"
            )
        else:
            problems += _differences(wanted[normalized(name)], _locked(name, registry))
    if absent:  # the lock knows what may have offered it
        here = {normalized(name) for name in registry.distributions}
        gone = [found for name, found in wanted.items() if name not in here]
        hints = [
            f"plugins.lock: distribution {found.name} {found.version} is locked and not installed: "
            f"`pip install {found.name}=={found.version}`"
            for found in gone
        ]
        problems += [*absent, *hints] if hints else []
    return problems


def _differences(wanted: LockedDistribution, found: LockedDistribution) -> list[str]:
    subject = f"plugins.lock: distribution {wanted.name}"
    if found.version != wanted.version:
        return [
            f"{subject}: version {wanted.version} is locked, {found.version} is installed: install {wanted.version}, "
            f"or, {_ANEW}"
        ]
    if found.contracts != wanted.contracts:
        return [f"{subject}: contracts {wanted.contracts} are locked, {found.contracts} are offered; {_ANEW}"]
    if found.digest != wanted.digest:
        kind = {True: "an editable install", False: "an installed distribution"}
        how = "its files have changed"
        if found.editable != wanted.editable:
            how = f"{kind[wanted.editable]} is locked, this is {kind[found.editable]}"
        return [
            f"{subject} {wanted.version}: {how} (locked {wanted.digest}, found {found.digest}): reinstall what was "
            f"locked, or, {_ANEW}"
        ]
    return []


def _usable(config: EngineConfig, registry: Registry, reasons: list[str]) -> list[str]:
    """Distributions that the config may use: pegboard, those that it names, and those that `auto` may choose from.
    `reasons` collects what isn't there."""
    names = {FIRST_PARTY: FIRST_PARTY}
    for where, role, choice in config.choices():
        if choice.use == "auto":
            continue
        try:
            distribution = registry.get(role, choice.use).distribution
        except PluginError as error:
            reasons.append(f"{where}: {error}")
        else:
            if distribution is not None:
                names.setdefault(normalized(distribution), distribution)
    installed = {normalized(name): name for name in registry.distributions}
    for name in config.plugins.allow:
        if normalized(name) in installed:
            names.setdefault(normalized(name), installed[normalized(name)])
        else:
            reasons.append(f"plugins.allow: no installed distribution {name!r} offers plugins")
    return list(names.values())


def _locked(name: str, registry: Registry) -> LockedDistribution:
    distribution = metadata.distribution(name)
    modules = {point.module for point in distribution.entry_points.select(group=GROUP)}
    contracts: dict[str, int] = {}
    for role, entry in _entries(registry):
        if entry.distribution is not None and normalized(entry.distribution) == normalized(name):
            contracts[role] = max(contracts.get(role, 0), entry.part.contract)
            modules.update(_module(target) for target in (entry.part.factory, entry.part.options) if target)
    return LockedDistribution(
        name=normalized(name),
        version=distribution.version,
        digest=digest_of(distribution, modules),
        editable=is_editable(distribution),
        contracts=contracts,
    )


def _entries(registry: Registry) -> Iterable[tuple[str, RegisteredPart]]:
    return ((role, entry) for role in ROLES for entry in registry.parts(role))


def _module(target: Any) -> str:
    """Installed plugins name factories and options by import path."""
    return str(target).partition(":")[0]
