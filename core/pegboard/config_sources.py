"""Reading config files and overrides into plain mappings; nothing is validated but the form."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from .errors import ConfigError

SUFFIXES: Final = (".toml", ".yaml", ".yml", ".json")


def read_config(path: str | Path) -> dict[str, Any]:
    """The mapping in a TOML, YAML or JSON file, by its suffix. ConfigError for a file that is missing, malformed, has a
    key twice, or holds anything but a mapping at the top."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"config {path}: unknown suffix {suffix!r}; use one of {', '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
        if suffix == ".toml":
            found: Any = tomllib.loads(text)
        elif suffix == ".json":
            found = json.loads(text, object_pairs_hook=_unique)
        else:
            found = yaml.load(text, Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"config {path} can't be read: {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"config {path} is malformed: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config {path} must hold a mapping at the top, not {type(found).__name__}")
    return found


def apply_overrides(
    values: Mapping[str, Any], overrides: Mapping[str, Any] | Sequence[str], choices: Container[str]
) -> tuple[dict[str, Any], list[str]]:
    """A copy of `values` with dotted keys set, e.g. "cache.options.eviction=lru", and what was wrong with some.

    Texts are read as TOML values, and as plain strings when they are none: lru, 2GiB, 16, true, [1, 2]; null, which
    TOML lacks, is None. A number as a key is an index into a list that is there ("observers.0.use"). `choices` names
    the top-level keys that choose parts: a bare name there makes room for options."""
    result = copy.deepcopy(dict(values))
    problems: list[str] = []
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        pairs = list(overrides.items())
    else:
        pairs = []
        for text in overrides:
            key, equals, value = text.partition("=")
            if equals:
                pairs.append((key.strip(), _value(value.strip())))
            else:
                problems.append(f"override {text!r}: must have the form key=value")
    for key, value in pairs:
        problem = _set(result, key, copy.deepcopy(value), choices)
        if problem:
            problems.append(f"override {key!r}: {problem}")
    return result, problems


def _set(root: dict[str, Any], key: str, value: Any, choices: Container[str]) -> str | None:
    """Set one key; returns why it can't be."""
    steps = key.split(".")
    if not all(steps):
        return "must be a dotted key such as cache.options.eviction"
    parent: Any = root
    for depth, step in enumerate(steps):
        place: Any
        if isinstance(parent, dict):
            place = step
            parent.setdefault(place, {})
            if parent[place] is None:
                parent[place] = {}
        elif isinstance(parent, list) and step.isdecimal() and int(step) < len(parent):
            place = int(step)
        elif isinstance(parent, list):
            return f"{'.'.join(steps[:depth])} has {len(parent)} items, there is no item {step!r}"
        else:
            return f"{'.'.join(steps[:depth])} is {parent!r}, which holds no keys"
        if depth == len(steps) - 1:
            parent[place] = value
            return None
        is_choice = ".".join(steps[: depth + 1]) in choices or (isinstance(parent, list) and steps[0] in choices)
        if isinstance(parent[place], str) and is_choice:
            parent[place] = {"use": parent[place]}  # cache = "paged" is short for { use = "paged" }
        parent = parent[place]
    return None


def _value(text: str) -> Any:
    if text == "null":
        return None
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = found.get("value")
    plain = isinstance(value, bool | int | float | str | list | dict)  # a TOML date is meant as text here
    return value if plain and len(found) == 1 else text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"key {', '.join(map(repr, twice))} is given twice")
    return result


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe subset, where a key given twice and a key that is no string are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                shown = getattr(key_node, "value", "")
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shown!r} is not a string; quote it", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)
