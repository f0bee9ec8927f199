"""Writes docs/reference.md from the code: fields of the config and of parts' options from their schemas, hooks and
methods of the contracts with their exact signatures. Run by `make reference`; a test compares."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from pegboard import EngineConfig, Registry
from pegboard.contracts.part import CONTRACT_VERSIONS, ROLES
from pegboard.registry.hookspecs import ObserverSpec, PluginSpec
from pegboard.registry.interfaces import INTERFACES

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"

HEAD = """# Reference

Made by `make reference` from the code; a test compares. Meanings of the config's fields: [config.md](config.md).
What methods must do: the files named here, [plugins.md](plugins.md) and [contracts.md](contracts.md).
"""


def reference() -> str:
    return "\n".join([HEAD, *_config(), *_options(), *_hooks(), *_contracts()])


def _config() -> Iterator[str]:
    yield "## Fields of the config\n"
    yield from _fields(EngineConfig.model_json_schema())


def _options() -> Iterator[str]:
    yield "## Options of Pegboard's own parts\n"
    registry = Registry.discover()
    for role in ROLES:
        for entry in registry.parts(role):
            model = entry.options_model() if entry.first_party else None
            if model is not None:
                yield f"### {role} `{entry.part.name}`\n"
                yield from _fields(model.model_json_schema())


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    yield "| field | type | default |"
    yield "|---|---|---|"
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = "required" if name in required else f"`{json.dumps(field.get('default'))}`"
        yield f"| `{name}` | {_type(field, schema.get('$defs', {}))} | {default} |"
    yield ""


def _type(field: dict[str, Any], known: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return " or ".join(f"`{value}`" for value in known[name]["enum"]) if "enum" in known[name] else name
    for key in ("anyOf", "oneOf", "allOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_type(each, known) for each in field[key]))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        items = field.get("items")
        return f"list of {_type(items, known)}" if items else "list"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {field[name]}" for name, sign in bounds.items() if name in field)
    return str(field.get("type", "any")) + (f" ({limits})" if limits else "")


def _hooks() -> Iterator[str]:
    yield "## Hooks\n"
    for spec in (PluginSpec, ObserverSpec):
        yield f"`{spec.__name__}`:\n\n```text"
        for name, hook in vars(spec).items():
            if name.startswith("pegboard_"):
                yield signature(name, hook)
        yield "```\n"


def _contracts() -> Iterator[str]:
    yield "## Contracts\n"
    for role in ROLES:
        interface = INTERFACES[role]
        file = Path("core", *interface.__module__.split(".")).with_suffix(".py")
        yield f"### {role}, version {CONTRACT_VERSIONS[role]}: `{interface.__name__}`\n\n`{file}`\n\n```text"
        yield from methods(interface)
        yield "```\n"


def methods(interface: type) -> Iterator[str]:
    """One line a public attribute, property or method of a contract."""
    for name, value in vars(interface).get("__annotations__", {}).items():
        if not name.startswith("_"):
            default = f" = {vars(interface)[name]!r}" if name in vars(interface) else ""
            yield f"{name}: {value}{default}"
    for name, value in vars(interface).items():
        if name.startswith("_"):
            continue
        optional = "" if name in getattr(interface, "__abstractmethods__", ()) else "  # optional"
        if isinstance(value, classmethod):
            yield f"classmethod {signature(name, value.__func__)}{optional}"
        elif isinstance(value, property):
            yield f"property {signature(name, value.fget)}{optional}"
        elif isinstance(value, FunctionType):
            yield signature(name, value) + optional


def signature(name: str, function: Any) -> str:
    """As it is written in the source."""
    text = str(inspect.signature(function)).replace("'", "")
    return f"{name}{text}"


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("usage: reference.py")
    PAGE.write_text(reference(), encoding="utf-8")
