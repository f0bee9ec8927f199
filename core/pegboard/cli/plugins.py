"""`pegboard plugins`: what is installed, what would be chosen, whether it is sound; locks, and new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..contracts.part import ROLES
from ..errors import ConfigError, PegboardError, PluginError
from ..registry.interfaces import contract_problems
from ..registry.lock import lock_text, make_lock
from ..registry.observers import hook_problems
from ..registry.options import listed, nearest
from ..registry.parts import RegisteredPart
from ..registry.registry import Registry
from ..registry.report import broken_text, decisions_data, decisions_text, parts_data, parts_text
from ..registry.resolution import resolve_static
from ..scaffold import TEMPLATE_ROLES, new_plugin
from .engine_options import ModelOption, SetOption, read_options
from .output import AsJson, emit

#: Stands for a model where none is named.
_NONE = "(none)"

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, explain, check, lock and start plugins.")


@app.command("list")
def list_parts(as_json: AsJson = False) -> None:
    """Every part that is installed, and the plugins that are broken. Imports no part."""
    registry = Registry.discover()
    emit(parts_data(registry), parts_text(registry), as_json=as_json)


@app.command()
def explain(
    config: Annotated[Path | None, typer.Argument(help="A config file; without one, the defaults.")] = None,
    model: ModelOption = None,
    role: Annotated[str | None, typer.Option(help="Only the choices of this role.")] = None,
    overrides: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """What a config chooses for each role, and why the others lost.

    With a model, each candidate is asked whether it can serve it; without one, descriptors decide."""
    if role is not None and role not in ROLES:
        raise PluginError(f"unknown role {role!r}{nearest(role, ROLES)}; roles: {', '.join(ROLES)}")
    registry = Registry.discover()
    asked = read_options(model, config, overrides, otherwise=_NONE)
    if asked.model != _NONE:
        from ..assembly import explain as explain_model

        decisions = list(explain_model(asked, registry))
        note = ""
    else:
        decisions = resolve_static(asked, registry)
        note = "No model is named: decided from descriptors alone.\n\n"
    if role is not None:
        decisions = [decision for decision in decisions if decision.role == role]
    data = {"static": bool(note), **decisions_data(decisions, registry.broken)}
    text = decisions_text(decisions, registry.broken)
    if not decisions and role is not None:
        text = (
            f"{role}: none is asked for; there are {listed(entry.part.name for entry in registry.parts(role))}\n{text}"
        )
    emit(data, note + text, as_json=as_json)


@app.command()
def check(
    name: Annotated[str | None, typer.Argument(help="A plugin, a distribution or a part; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import every part and hold it against its contract. Exits with 1 when something is wrong."""
    registry = Registry.discover()
    entries = [entry for role in ROLES for entry in registry.parts(role)]
    broken = list(registry.broken)
    if name is not None:
        known = {known for entry in entries for known in (entry.plugin, entry.distribution, entry.part.name) if known}
        known |= {known for plugin in broken for known in (plugin.plugin, plugin.distribution) if known}
        entries = [entry for entry in entries if name in (entry.plugin, entry.distribution, entry.part.name)]
        broken = [plugin for plugin in broken if name in (plugin.plugin, plugin.distribution)]
        if not entries and not broken:
            raise PluginError(f"no plugin, distribution or part {name!r}{nearest(name, known)}; known: {listed(known)}")
    results = [_checked(registry, entry) for entry in entries]
    lines = [_line(result) for result in results]
    failed = broken or any(result["problems"] for result in results)
    data = {"ok": not failed, "parts": results, "broken": msgspec.to_builtins(broken)}
    emit(data, "\n".join([*lines, *broken_text(broken, tracebacks=True)]), as_json=as_json)
    if failed:
        raise typer.Exit(1)


@app.command()
def lock(
    config: Annotated[Path | None, typer.Option("-c", "--config", help="Only what this config may use.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file; what it held is replaced.")] = Path(
        "pegboard.lock"
    ),
    as_json: AsJson = False,
) -> None:
    """Write down the plugins that are installed: version, digest and contracts of each distribution.

    A config that names the file in `plugins.lock` is refused when anything about them has changed."""
    values = None if config is None else read_options(None, config, None, otherwise=_NONE)
    made = make_lock(Registry.discover(), values)
    try:
        out.write_text(lock_text(made), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error}") from error
    lines = [f"{found.name} {found.version} {found.digest[:19]}" for found in made.distributions]
    emit(msgspec.to_builtins(made), "\n".join([*lines, f"written to {out}"]), as_json=as_json)


@app.command()
def new(
    role: Annotated[str, typer.Argument(help=f"What it is: {', '.join(TEMPLATE_ROLES)}.")],
    name: Annotated[str, typer.Argument(help="Name of the distribution, of its part and, with '_', of its package.")],
    into: Annotated[Path, typer.Option(help="Where its folder is made.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a new plugin: a distribution with a part that works, its tests, README and CI."""
    made = new_plugin(role, name, into)
    lines = [f"{made.folder}:", *(f"  {file}" for file in made.files)]
    lines += ["", f"next: cd {made.folder} && pip install -e '.[test]' && pytest"]
    data = {"folder": str(made.folder), "name": made.name, "package": made.package, "files": list(made.files)}
    emit(data, "\n".join(lines), as_json=as_json)


def _checked(registry: Registry, entry: RegisteredPart) -> dict[str, Any]:
    problems: list[str] = []
    rivals = registry.ambiguous.get((entry.part.role, entry.part.name), ())
    if rivals:
        problems.append(f"ambiguous: offered by {' and '.join(rival.source for rival in rivals)}")
    try:
        factory = entry.load()
        problems += contract_problems(entry.part.role, factory)
        if entry.part.role == "observer":
            problems += hook_problems(factory)
    except PegboardError as error:
        problems.append(str(error))
    try:
        entry.options_model()
    except PegboardError as error:
        problems.append(str(error))
    return {
        "role": entry.part.role,
        "name": entry.part.name,
        "plugin": entry.plugin,
        "distribution": entry.distribution,
        "problems": problems,
    }


def _line(result: dict[str, Any]) -> str:
    verdict = "FAIL" if result["problems"] else "ok"
    reasons = "".join(f"\n      {problem}" for problem in result["problems"])
    return f"{verdict:<5} {result['role']} {result['name']}  [{result['distribution']}, {result['plugin']}]{reasons}"
