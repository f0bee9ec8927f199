"""New plugins from templates: distributions that work, whose names stand for themselves until they are replaced."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import Final

import msgspec

from .contracts.part import ROLES
from .errors import PluginError
from .registry.options import nearest

_TEMPLATES: Final = Path(__file__).parent / "templates"
#: Files of every role; those of a role stand beside.
_COMMON: Final = "common"
#: Roles that have a template.
TEMPLATE_ROLES: Final = ("attention", "cache", "scheduler", "sampler", "quantizer", "logits_processor", "speculator")


class NewPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    folder: Path
    #: Of the distribution, and of the part.
    name: str
    package: str
    #: Relative to the folder.
    files: tuple[str, ...]


def new_plugin(role: str, name: str, into: Path) -> NewPlugin:
    """Write a distribution with one part of `role` into a new folder `into`/`name`.

    PluginError: no template of that role, a name that can't be a distribution and a package, a folder that exists."""
    if role not in TEMPLATE_ROLES:
        known = "it has no template, see docs/plugins.md" if role in ROLES else f"no such role{nearest(role, ROLES)}"
        raise PluginError(f"role {role!r}: {known}; templates: {', '.join(TEMPLATE_ROLES)}")
    name = _distribution_name(name)
    package = name.replace("-", "_")
    _check_package(name, package)
    folder = into / name
    if folder.exists() or folder.is_symlink():
        raise PluginError(f"{folder} exists already: choose another name, or another folder with --into")
    words = {"my-part": name, "my_part": package, "MyPart": _class_name(name, role)}
    files = {_replaced(path, words): _replaced(text, words) for path, text in _template(role).items()}
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(f"{folder} can't be written: {error}") from error
    return NewPlugin(folder=folder, name=name, package=package, files=tuple(sorted(files)))


def _template(role: str) -> dict[str, str]:
    """Path -> text of the role's files and of those that all roles share."""
    found: dict[str, str] = {}
    for root in (_TEMPLATES / _COMMON, _TEMPLATES / role):
        for file in root.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:  # an installer compiles what ends in .py
                found[file.relative_to(root).as_posix()] = file.read_text(encoding="utf-8")
    return found


def _replaced(text: str, words: dict[str, str]) -> str:
    for word, own in words.items():
        text = text.replace(word, own)
    return text


def _distribution_name(name: str) -> str:
    """In its normal form (PEP 503), as parts are called, too."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise PluginError(
            f"{name!r} is no name of a distribution: letters, digits, '-', '_' and '.', with a letter or digit at "
            "both ends (PEP 508)"
        )
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_package(name: str, package: str) -> None:
    problem = ""
    if not package.isidentifier():
        problem = "a package can't begin with a digit"
    elif keyword.iskeyword(package):
        problem = "it is a keyword of Python"
    elif package in sys.stdlib_module_names:
        problem = "the standard library has a module of that name"
    elif package in ("auto", "tests"):
        problem = "the name is taken: 'auto' by the automatic choice, 'tests' by the folder of tests"
    elif importlib.util.find_spec(package) is not None:
        problem = "a module of that name can be imported here already"
    if problem:
        raise PluginError(f"{name!r} can't be the package {package!r}: {problem}; choose another name")


def _class_name(name: str, role: str) -> str:
    words, what = name.split("-"), role.rpartition("_")[2]
    if words[-1] != what:
        words.append(what)
    return "".join(word[:1].upper() + word[1:] for word in words)
