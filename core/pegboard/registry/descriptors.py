"""Checks of the descriptors that a plugin returns. Nothing is imported for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from ..contracts.part import CONTRACT_VERSIONS, OBJECTIVES, ROLES, Part
from .options import nearest

_IMPORT_PATH: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def parts_of(returned: object) -> tuple[Part, ...]:
    """The descriptors in what `pegboard_parts` returned. TypeError for anything but a sequence of them."""
    if isinstance(returned, str) or not isinstance(returned, Sequence):
        raise TypeError(f"pegboard_parts returned {type(returned).__name__}, not a list or tuple of Part")
    for index, item in enumerate(returned):
        if not isinstance(item, Part):
            raise TypeError(f"pegboard_parts returned {type(item).__name__} at index {index}, not Part")
    return tuple(returned)


def descriptor_problems(parts: Sequence[Part], source: str, *, packaged: bool) -> list[str]:
    """Everything wrong with the descriptors of one plugin. `packaged`: found by entry point, so that factories must be
    import paths; only a plugin passed as an object may hold classes."""
    problems: list[str] = []
    seen: set[tuple[str, str]] = set()
    for part in parts:
        label = f"part ({part.role!r}, {part.name!r})"
        found = _type_problems(part)
        if not found:
            found = [*_contract_problems(part, source), *_import_path_problems(part, packaged)]
            if (part.role, part.name) in seen:
                found.append("declared twice by this plugin")
            seen.add((part.role, part.name))
        problems.extend(f"{label}: {problem}" for problem in found)
    return problems


def _type_problems(part: Part) -> list[str]:
    """msgspec does not check fields of a record that is built directly, so it is done here."""
    problems = []
    if not isinstance(part.role, str) or part.role not in ROLES:
        problems.append(f"unknown role{nearest(str(part.role), ROLES)}; roles: {', '.join(ROLES)}")
    if not isinstance(part.name, str) or not _NAME.fullmatch(part.name):
        problems.append("name must consist of letters, digits, '.', '_' and '-'")
    elif part.name == "auto":
        problems.append("the name 'auto' is taken by the automatic choice")
    if not isinstance(part.summary, str) or "\n" in part.summary:
        problems.append("summary must be one line of text")
    for field in ("contract", "priority"):
        if type(getattr(part, field)) is not int:
            problems.append(f"{field} must be an integer, not {getattr(part, field)!r}")
    for field in ("requires", "devices", "matches"):
        value = getattr(part, field)
        if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
            problems.append(f"{field} must be a tuple of strings, not {value!r}")
    if not isinstance(part.objectives, Mapping):
        problems.append(f"objectives must be a mapping, not {part.objectives!r}")
    else:
        for key, value in part.objectives.items():
            if key not in OBJECTIVES or type(value) is not int:
                problems.append(f"objectives may map {', '.join(OBJECTIVES)} to integers, not {key!r} to {value!r}")
    return problems


def _contract_problems(part: Part, source: str) -> list[str]:
    newest = CONTRACT_VERSIONS[part.role]
    wanted = [version for version in (newest - 1, newest) if version >= 1]
    if part.contract in wanted:
        return []
    return [
        f"contract version mismatch: {source} offers version {part.contract} of the {part.role} contract, "
        f"this pegboard wants {' or '.join(map(str, wanted))}"
    ]


def _import_path_problems(part: Part, packaged: bool) -> list[str]:
    problems = []
    for what, target in (("factory", part.factory), ("options", part.options)):
        if isinstance(target, str):
            if not _IMPORT_PATH.fullmatch(target):
                problems.append(f"{what} {target!r} is no import path of the form 'package.module:Attribute'")
        elif target is not None and packaged:
            problems.append(f"{what} must be an import path, so that the manifest stays light, not {target!r}")
        elif what == "factory" and target is None:
            problems.append("factory must be an import path or a class, not None")
    return problems
