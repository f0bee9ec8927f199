"""Decisions, parts and broken plugins as text for people and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..contracts.part import ROLES
from .parts import BrokenPlugin, RegisteredPart
from .registry import Registry
from .resolution import Decision


def decisions_data(decisions: Iterable[Decision], broken: Iterable[BrokenPlugin] = ()) -> dict[str, Any]:
    """{"decisions": [...], "broken": [...]}"""
    return {"decisions": msgspec.to_builtins(list(decisions)), "broken": msgspec.to_builtins(list(broken))}


def decisions_text(decisions: Sequence[Decision], broken: Sequence[BrokenPlugin] = ()) -> str:
    """For each choice: what was asked, who won, and why the others lost."""
    blocks = []
    for decision in decisions:
        about = f"asked: {decision.asked}" + (f", for {decision.key}" if decision.key else "")
        lines = [f"{decision.where}: {decision.winner or 'NONE'}  ({about})"]
        lines.extend(f"  note: {note}" for note in decision.notes)
        for candidate in decision.candidates:
            source = candidate.distribution or candidate.plugin or "not installed"
            lines.append(f"  {candidate.verdict:<12} {candidate.name}  [{source}, score {candidate.score}]")
            lines.extend(f"      {reason}" for reason in candidate.reasons)
        if not decision.candidates:
            lines.extend(f"      {reason}" for reason in decision.reasons)
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, *broken_text(broken)])


def broken_text(broken: Sequence[BrokenPlugin], *, tracebacks: bool = False) -> list[str]:
    """One block a broken plugin."""
    blocks = []
    for plugin in broken:
        trace = f"\n{plugin.traceback.rstrip()}" if tracebacks and plugin.traceback else ""
        blocks.append(f"BROKEN {plugin.source}: {plugin.reason}{trace}")
    return blocks


def parts_data(registry: Registry) -> dict[str, Any]:
    """{"parts": [...], "broken": [...]}, parts by role and name."""
    return {
        "parts": [_part_data(registry, entry) for role in ROLES for entry in registry.parts(role)],
        "broken": msgspec.to_builtins(list(registry.broken)),
    }


def parts_text(registry: Registry) -> str:
    """A table of parts, then the broken plugins."""
    rows = [("ROLE", "NAME", "DISTRIBUTION", "VERSION", "CONTRACT", "SUMMARY")]
    for role in ROLES:
        for entry in registry.parts(role):
            data = _part_data(registry, entry)
            summary = data["summary"] + (" (AMBIGUOUS)" if data["ambiguous"] else "")
            distribution = entry.distribution or "(object)"
            rows.append((role, data["name"], distribution, entry.version or "-", str(data["contract"]), summary))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return "\n\n".join([table, *broken_text(registry.broken)])


def _part_data(registry: Registry, entry: RegisteredPart) -> dict[str, Any]:
    part = entry.part
    return {
        "role": part.role,
        "name": part.name,
        "plugin": entry.plugin,
        "distribution": entry.distribution,
        "version": entry.version,
        "contract": part.contract,
        "summary": part.summary,
        "priority": part.priority,
        "objectives": dict(part.objectives),
        "requires": list(part.requires),
        "devices": list(part.devices),
        "matches": list(part.matches),
        "factory": part.factory if isinstance(part.factory, str) else repr(part.factory),
        "ambiguous": (part.role, part.name) in registry.ambiguous,
    }
