"""Choosing one part for one role, and keeping the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, PluginError
from .judging import Candidate, Judge, Verdict
from .parts import RegisteredPart
from .registry import Registry

if TYPE_CHECKING:
    from ..config import EngineConfig, PartChoice


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one choice of the config. JSON: `msgspec.to_builtins`."""

    role: str
    #: The field of the config that asked, e.g. "decode_attention".
    where: str
    #: "auto" or the name that the config gives.
    asked: str
    #: What must be recognised (an architecture, a scheme), if anything.
    key: str | None
    winner: str | None
    #: In the order of preference.
    candidates: tuple[Candidate, ...]
    #: Why there is no winner; empty when there is one.
    reasons: tuple[str, ...] = ()
    #: What the choice of the winner costs elsewhere.
    notes: tuple[str, ...] = ()

    def reasons_text(self) -> str:
        """Why there is no winner, one reason a line; "" when there is one."""
        return "\n".join(self.reasons)


def resolve(
    registry: Registry,
    role: str,
    choice: PartChoice,
    need: Any,
    *,
    device_type: str,
    objective: str,
    allow: Sequence[str],
    key: str | None = None,
    where: str | None = None,
    static: bool | None = None,
) -> Decision:
    """The part that fills `role`. Refusals never raise: a decision without a winner holds the reasons.

    `need` goes to the factories' `refusals`, in the order of preference until one has none; later candidates are not
    imported. `static`: decide from descriptors alone and import no factory; by default so when `need` is None (the
    observer's contract has no need: pass False). `device_type` "auto" leaves the device out. `key` must be among the
    part's `matches`. `where` is the config's field, by default the role.
    """
    where = role if where is None else where
    static = need is None if static is None else static
    judge = Judge(choice.options, need, static, device_type, objective, key, where)
    if choice.use == "auto":
        candidates = _automatic(registry.parts(role), judge, allow)
    else:
        candidates = _named(registry, role, choice.use, judge, allow)
    winner = next((candidate.name for candidate in candidates if candidate.verdict == "chosen"), None)
    return Decision(
        role=role,
        where=where,
        asked=choice.use,
        key=key,
        winner=winner,
        candidates=candidates,
        reasons=() if winner is not None else _explain(registry, role, where, choice.use, candidates, key),
    )


def winner(registry: Registry, decision: Decision) -> RegisteredPart:
    """The part that won. By its source, not its name: another plugin, which was not allowed, may use the same name.
    ConfigError with the decision's reasons when nobody won; PluginError when this registry doesn't hold it."""
    chosen = next((candidate for candidate in decision.candidates if candidate.verdict == "chosen"), None)
    if chosen is None or chosen.plugin is None:
        raise ConfigError(f"no {decision.role} can be used", decision.reasons)
    return registry.exactly(decision.role, chosen.name, chosen.plugin, chosen.distribution)


def resolve_static(config: EngineConfig, registry: Registry) -> list[Decision]:
    """The decisions that descriptors and options alone admit, one a choice of the config."""
    return [
        resolve(
            registry,
            role,
            choice,
            None,
            device_type=config.device.partition(":")[0],
            objective=config.objective,
            allow=config.plugins.allow,
            where=where,
        )
        for where, role, choice in config.choices()
    ]


def _automatic(entries: Sequence[RegisteredPart], judge: Judge, allow: Sequence[str]) -> tuple[Candidate, ...]:
    allowed = [entry for entry in entries if entry.allowed(allow)]
    names = [entry.part.name for entry in allowed]
    allowed.sort(key=lambda entry: (-judge.score(entry), entry.part.name))
    candidates: list[Candidate] = []
    chosen: Candidate | None = None
    for entry in allowed:
        if names.count(entry.part.name) > 1:
            rivals = [other.source for other in allowed if other.part.name == entry.part.name]
            verdict: Verdict = "ambiguous"
            reasons = [f"offered by {' and '.join(rivals)}; uninstall all but one of them"]
        elif judge.key is not None and not entry.part.matches:
            verdict, reasons = "refused", [f"recognises nothing by itself, so not {judge.key}"]
        elif chosen is not None:
            reasons = judge.static_refusals(entry)
            verdict = "refused" if reasons else "eligible"
            reasons = reasons or [f"{chosen.name!r} comes first (score {chosen.score}); not examined further"]
        else:
            verdict, reasons = judge.judge(entry)
        candidates.append(judge.candidate(entry, verdict, reasons))
        if verdict == "chosen":
            chosen = candidates[-1]
    waiting = [
        judge.candidate(
            entry, "not allowed", [f"available, not allowed: add {entry.distribution!r} to plugins.allow, or name it"]
        )
        for entry in entries
        if not entry.allowed(allow)
    ]
    return (*candidates, *waiting)


def _named(registry: Registry, role: str, name: str, judge: Judge, allow: Sequence[str]) -> tuple[Candidate, ...]:
    others = [
        judge.candidate(entry, "eligible" if entry.allowed(allow) else "not allowed", [f"the config names {name!r}"])
        for entry in registry.parts(role)
        if entry.part.name != name
    ]
    try:
        entry = registry.get(role, name)
    except PluginError as error:
        rivals = registry.ambiguous.get((role, name), ())
        if rivals:
            return (*(judge.candidate(rival, "ambiguous", [str(error)]) for rival in rivals), *others)
        culprit = next((plugin for plugin in registry.broken if (role, name) in plugin.parts), None)
        unknown = Candidate(
            name=name,
            plugin=culprit.plugin if culprit else None,
            distribution=culprit.distribution if culprit else None,
            verdict="broken" if culprit else "refused",
            reasons=(str(error),),
        )
        return (unknown, *others)
    verdict, reasons = judge.judge(entry)
    return (judge.candidate(entry, verdict, reasons), *others)


def _explain(
    registry: Registry, role: str, where: str, asked: str, candidates: Sequence[Candidate], key: str | None
) -> tuple[str, ...]:
    """Why nobody won: each named or examined candidate's reasons, under the field's path. Candidates for other keys
    say only what there is."""
    if asked != "auto":
        reasons = [reason for candidate in candidates if candidate.name == asked for reason in candidate.reasons]
        return tuple(dict.fromkeys(_at(where, asked, reason) for reason in reasons))
    found = []
    if not candidates:
        found = [f"{where}: no plugin offers a part for the role {role}; install a distribution that does"]
    elif key is not None:
        keys = {entry.part.name: entry.part.matches for entry in registry.parts(role)}
        candidates = [candidate for candidate in candidates if key in keys.get(candidate.name, ())]
        if not candidates:
            known = sorted({match for matches in keys.values() for match in matches})
            found = [f"{where}: no part here recognises {key}; recognised are {', '.join(known) or 'none'}"]
    found += [_at(where, candidate.name, reason) for candidate in candidates for reason in candidate.reasons]
    found += [
        f"{where}: {plugin.source} is broken: {plugin.reason}"
        for plugin in registry.broken
        if not plugin.parts or any(offered == role for offered, _ in plugin.parts)
    ]
    return tuple(dict.fromkeys(found))


def _at(where: str, name: str, reason: str) -> str:
    """Reasons about options carry their own path already."""
    return reason if reason.startswith(f"{where}.") else f"{where} = {name!r}: {reason}"
