"""What an installed distribution consists of, as one number.

Installed: the files of its RECORD as they are now, without what installers write for this place (scripts, bytecode,
where it came from). Editable, or without a RECORD: all files of the top-level packages that its entry points and parts
name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Final

#: Files of a dist-info folder that differ between equal installs.
_OF_THE_INSTALLER: Final = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})


def is_editable(distribution: metadata.Distribution) -> bool:
    """Whether its code lies elsewhere and may change under it (PEP 660)."""
    try:
        return bool(json.loads(distribution.read_text("direct_url.json") or "{}")["dir_info"]["editable"])
    except (KeyError, TypeError, ValueError):
        return False


def digest_of(distribution: metadata.Distribution, modules: Collection[str]) -> str:
    """ "sha256:..." over paths and contents; `modules` are the import names that it is known to have."""
    if distribution.read_text("RECORD") is None or is_editable(distribution):
        files = dict(file for module in sorted(modules) for file in _package_files(module.partition(".")[0]))
    else:
        files = dict(_recorded_files(distribution))
    total = hashlib.sha256()
    for name in sorted(files):
        content = hashlib.sha256(files[name].read_bytes()).hexdigest() if files[name].is_file() else "missing"
        total.update(f"{name}\0{content}\n".encode())
    return f"sha256:{total.hexdigest()}"


def _recorded_files(distribution: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    for file in distribution.files or ():
        path = PurePosixPath(file)
        of_installer = path.parent.suffix == ".dist-info" and path.name in _OF_THE_INSTALLER
        if not (of_installer or path.parts[0] == ".." or path.suffix == ".pyc"):
            yield path.as_posix(), Path(str(distribution.locate_file(file)))


def _package_files(name: str) -> Iterator[tuple[str, Path]]:
    """Found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        if spec.origin is not None:
            yield Path(spec.origin).name, Path(spec.origin)
        return
    for folder in spec.submodule_search_locations:
        for file in Path(folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
                yield f"{name}/{file.relative_to(folder).as_posix()}", file
