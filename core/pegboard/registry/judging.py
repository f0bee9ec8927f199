"""One candidate for a role, held against what is wanted."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, Literal

import msgspec

from ..errors import ConfigError, PegboardError, PluginError
from .observers import hook_problems
from .parts import RegisteredPart

Verdict = Literal["chosen", "eligible", "refused", "not allowed", "broken", "ambiguous"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One part that might have filled the role."""

    name: str
    #: None: no such part is registered.
    plugin: str | None
    distribution: str | None
    verdict: Verdict
    #: Why it was not chosen.
    reasons: tuple[str, ...] = ()
    #: priority, plus what the part declares for the config's objective.
    score: int = 0


class Judge(msgspec.Struct, frozen=True):
    """What every candidate of one decision is held against."""

    options: Mapping[str, Any]
    need: Any
    static: bool
    device_type: str
    objective: str
    key: str | None
    where: str

    def score(self, entry: RegisteredPart) -> int:
        return entry.part.priority + entry.part.objectives.get(self.objective, 0)

    def candidate(self, entry: RegisteredPart, verdict: Verdict, reasons: Sequence[str] = ()) -> Candidate:
        return Candidate(
            name=entry.part.name,
            plugin=entry.plugin,
            distribution=entry.distribution,
            verdict=verdict,
            reasons=tuple(reasons),
            score=self.score(entry),
        )

    def static_refusals(self, entry: RegisteredPart) -> list[str]:
        """What the descriptor alone tells."""
        part = entry.part
        reasons = []
        if part.devices and self.device_type not in ("auto", *part.devices):
            reasons.append(f"runs on {' and '.join(part.devices)}, not on {self.device_type}")
        missing = [name for name in part.requires if not _importable(name)]
        if missing:
            how = part.install or "install it"
            reasons.append(f"needs {', '.join(missing)}, which can't be imported here: {how}")
        if self.key is not None and part.matches and self.key not in part.matches:
            reasons.append(f"recognises {', '.join(part.matches)}, not {self.key}")
        return reasons

    def judge(self, entry: RegisteredPart) -> tuple[Verdict, list[str]]:
        """The full verdict: "chosen" when nothing speaks against it."""
        reasons = self.static_refusals(entry)
        if reasons:
            return "refused", reasons
        try:
            if self.static and not self.options:
                return "chosen", []
            options = entry.options(self.options, f"{self.where}.options")
            if self.static:
                return "chosen", []
            factory = entry.load()
            problems = hook_problems(factory) if entry.part.role == "observer" else []
        except ConfigError as error:
            return "refused", list(error.reasons)
        except PluginError as error:
            return "broken", [str(error)]
        if problems:
            return "broken", problems
        reasons = _refusals(factory, entry, self.need, options)
        return ("refused", reasons) if reasons else ("chosen", [])


def _refusals(factory: Any, entry: RegisteredPart, need: Any, options: Any) -> list[str]:
    """The factory's own word. One that raises, or answers with something else than texts, is refused for it."""
    try:
        if entry.part.role == "checkpoint":  # it is asked about a path, and makes nothing up in advance
            return [] if factory.recognises(need.path) else [f"does not recognise {need.path}"]
        answer = factory.refusals(need, options)
    except KeyboardInterrupt:
        raise
    except PegboardError as error:
        return [str(error)]
    except BaseException as error:
        return [f"its refusals() raised {type(error).__name__}: {error} ({entry.source})"]
    if not isinstance(answer, list | tuple) or not all(isinstance(reason, str) for reason in answer):
        return [f"its refusals() returned {answer!r}, not a list of texts ({entry.source})"]
    return list(answer)


def _importable(name: str) -> bool:
    """Whether `name` could be imported, without importing it or its parents."""
    try:
        first, *rest = name.split(".")
        spec = importlib.util.find_spec(first)
        for depth, _ in enumerate(rest):
            if spec is None or spec.submodule_search_locations is None:
                return False
            full_name = ".".join([first, *rest[: depth + 1]])
            spec = PathFinder.find_spec(full_name, spec.submodule_search_locations)
    except (ImportError, ValueError):
        return False
    return spec is not None
