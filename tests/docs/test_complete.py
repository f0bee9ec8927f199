"""The guides leave nothing out: every field, default, option, command, hook, method and error, and no link is dead."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import typer

import pegboard
import pegboard.testing
from pegboard import EngineConfig, Part, Registry, Request, RequestMetrics, SamplingParams
from pegboard.cli.main import app
from pegboard.config import PartChoice, PluginsConfig, ShadowConfig
from pegboard.contracts.observer import EngineReady, RequestAdmitted, RequestFinished, StepDone, StepTimes
from pegboard.contracts.part import OBJECTIVES, ROLES
from pegboard.contracts.scheduler import FinishReason
from pegboard.contracts.shadow import ShadowCheck, ShadowStats
from pegboard.registry.hookspecs import ObserverSpec, PluginSpec
from pegboard.registry.interfaces import INTERFACES
from pegboard.testing import AttentionSuite, OpsSuite, QuantizerSuite, SamplerSuite, Suite
from pegboard.testing.conformance import TOLERANCES

ROOT = Path(__file__).parents[2]
#: Made by `make support` from the tests that passed, so it may not be here yet.
MADE = {ROOT / "docs" / "support.md"}


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(name: str, heading: str) -> dict[str, list[str]]:
    """The table whose first cell of the header is `heading`: first cell, without code marks -> the other cells."""
    lines = iter(text_of(name).splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            found = {}
            for row in lines:
                if not row.startswith("|"):
                    break
                first, *others = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
                found[first.strip("`")] = others
            return found
    raise AssertionError(f"{name} has no table that begins with {heading!r}")


def section(name: str, title: str) -> str:
    """The text below a heading, up to the next of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", text_of(name), re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no section {title!r}"
    return found[2]


def code(text: str) -> set[str]:
    """Everything marked as code, and the names that calls in it begin with."""
    marked = set(re.findall(r"`([^`\n]+)`", text))
    return marked | {mark.partition("(")[0] for mark in marked}


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """A default as code, "" for a field without one."""
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return ""
    if isinstance(value, SamplingParams) and value == SamplingParams():
        return "`SamplingParams()`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


# -- config.md


def written(value: Any) -> str:
    """A default as config.md writes it."""
    if isinstance(value, PartChoice):
        return f"{{use: {value.use}}}"
    if isinstance(value, PluginsConfig):
        return f"{{allow: {written(value.allow)}, lock: {written(value.lock)}}}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def test_every_field_of_the_config_has_its_row_and_default() -> None:
    table = rows("config.md", "field")
    assert list(table) == list(EngineConfig.model_fields), "fields, or their order, differ"
    for name, field in EngineConfig.model_fields.items():
        default, meaning = table[name]
        assert default == ("required" if field.is_required() else f"`{written(field.default)}`"), name
        for choice in get_args(field.annotation):
            if isinstance(choice, str):  # of a Literal
                assert f"`{choice}`" in meaning, f"{name}: {choice} is not named"


def test_every_field_of_shadow_has_its_row_and_default() -> None:
    table = rows("config.md", "field of `shadow`")
    assert {name: cells[0] for name, cells in table.items()} == {
        name: f"`{written(field.default)}`" for name, field in ShadowConfig.model_fields.items()
    }


def test_every_option_of_a_part_has_its_row_and_default() -> None:
    documented: dict[tuple[str, str], dict[str, str]] = {}
    lines = section("config.md", "Parts").splitlines()
    current = ("", "")
    for line in lines[lines.index("|---|---|---|---|") + 1 :]:
        if not line.startswith("|"):
            break
        part, option, default, _ = [cell.strip() for cell in line.split("|")[1:-1]]
        if part:
            role, _, name = part.partition(" ")
            current = (role, name.strip("`"))
        documented.setdefault(current, {})[option.strip("`")] = default.strip("`")
    expected = {}
    for role in ROLES:
        for entry in Registry.discover().parts(role):
            model = entry.options_model() if entry.first_party else None
            if model is not None:
                expected[role, entry.part.name] = {
                    name: "required" if field.is_required() else written(field.default)
                    for name, field in model.model_fields.items()
                }
    assert documented == expected


# -- embedding.md


@pytest.mark.parametrize("record", [Request, SamplingParams])
def test_every_field_of_a_request_has_its_row_and_default(record: type[msgspec.Struct]) -> None:
    table = rows("embedding.md", f"field of `{record.__name__}`")
    fields = msgspec.structs.fields(record)
    assert list(table) == [field.encode_name for field in fields]
    for field in fields:
        assert table[field.name][0] == default_of(field), field.name


def test_outputs_and_metrics_are_described() -> None:
    marked = code(text_of("embedding.md"))
    records = (pegboard.RequestOutput, pegboard.Completion, pegboard.Delta, pegboard.TokenLogprobs, RequestMetrics)
    for record in (*records, pegboard.EngineStats, ShadowStats, ShadowCheck):
        missing = {field.name for field in msgspec.structs.fields(record)} - marked
        assert not missing, f"{record.__name__}: {missing}"


def test_finish_reasons_and_errors_have_their_rows() -> None:
    assert set(rows("embedding.md", "`finish_reason`")) == set(get_args(FinishReason))
    errors = {
        name
        for name in pegboard.__all__
        if isinstance(getattr(pegboard, name), type) and issubclass(getattr(pegboard, name), pegboard.PegboardError)
    }
    assert set(rows("embedding.md", "error")) == errors - {"PegboardError"}


@pytest.mark.parametrize("name", ["Engine", "AsyncEngine", "Handle"])
def test_public_methods_are_named(name: str) -> None:
    found = getattr(pegboard, name)
    public = {method for method in vars(found) if not method.startswith("_")}
    #: What the engine's own thread and classes call.
    internal = {"Handle": {"put", "kill", "gather", "listen"}}.get(name, set())
    text = text_of("embedding.md")
    missing = {method for method in public - internal if not re.search(rf"\b{method}\b", text)}
    assert not missing


def test_every_public_name_is_in_a_guide() -> None:
    text = "".join(text_of(name) for name in ("embedding.md", "plugins.md"))
    missing = {name for name in pegboard.__all__ if not re.search(rf"\b{name}\b", text)}
    assert not missing


# -- plugins.md


def test_every_field_of_a_part_has_its_row_and_default() -> None:
    table = rows("plugins.md", "field of `Part`")
    fields = msgspec.structs.fields(Part)
    assert list(table) == [field.name for field in fields]
    for field in fields:
        assert table[field.name][0] == default_of(field), field.name
    for objective in OBJECTIVES:
        assert f"`{objective}`" in table["objectives"][1]


def test_there_is_a_section_a_role() -> None:
    titles = re.findall(r"^### `(\w+)`$", text_of("plugins.md"), re.MULTILINE)
    assert titles == list(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_section_names_its_class_file_and_methods(role: str) -> None:
    interface = INTERFACES[role]
    text = section("plugins.md", f"`{role}`")
    file = Path("core", *interface.__module__.split(".")).with_suffix(".py")
    marked = code(text)
    assert {str(file), interface.__name__} <= marked
    assert (ROOT / file).exists()
    public = {name for name in vars(interface) if not name.startswith("_")}
    methods = (public | interface.__abstractmethods__) - {"refusals", "create"}
    assert methods or role == "observer"
    missing = methods - marked
    assert not missing


def test_every_hook_is_listed_with_its_arguments() -> None:
    marked = code(text_of("plugins.md"))
    for spec in (PluginSpec, ObserverSpec):
        for name, hook in vars(spec).items():
            if name.startswith("pegboard_"):
                arguments = [a for a in hook.__code__.co_varnames[: hook.__code__.co_argcount] if a != "self"]
                assert f"{name}({', '.join(arguments)})" in marked
    table = rows("plugins.md", "hook")
    for hook, event in (
        ("pegboard_engine_ready(event)", EngineReady),
        ("pegboard_request_admitted(event)", RequestAdmitted),
        ("pegboard_request_finished(event)", RequestFinished),
        ("pegboard_step_done(event)", StepDone),
    ):
        missing = {field.name for field in msgspec.structs.fields(event)} - code(table[hook][0])
        assert not missing, f"{hook}: {missing}"
    described = code(section("plugins.md", "`observer`"))
    assert {"host", *(field.name for field in msgspec.structs.fields(StepTimes))} <= described


# -- testing.md


def test_every_public_name_for_testing_is_in_its_guide() -> None:
    missing = set(pegboard.testing.__all__) - code(text_of("testing.md") + text_of("testing_hosts.md"))
    assert not missing


def test_what_every_suite_is_told_has_its_row() -> None:
    declared = {name for name in Suite.__annotations__ if not name.startswith("_")}
    assert set(rows("testing.md", "attribute")) == declared - {"role", "features", "axes"}


@pytest.mark.parametrize("suite", [AttentionSuite, OpsSuite, QuantizerSuite, SamplerSuite])
def test_a_suites_section_names_its_features_and_lists(suite: type[Suite]) -> None:
    marked = code(section("testing.md", f"`{suite.__name__}`"))
    lists = set(suite.axes.values()) - {"dtypes"}
    missing = (set(suite.features) | lists) - marked
    assert not missing


def test_tolerances_have_their_rows() -> None:
    table = rows("testing.md", "dtype")
    assert {name: float(cells[0]) for name, cells in table.items()} == {
        name: tolerance.absolute for name, tolerance in TOLERANCES.items()
    }
    assert all(tolerance.absolute == tolerance.relative for tolerance in TOLERANCES.values())


# -- cli.md


def commands() -> Iterator[tuple[str, Any]]:
    """(path, command) of every command that runs."""
    root = typer.main.get_command(app)
    context = root.make_context("pegboard", ["plugins"])

    def walk(path: str, name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any]]:
        found = command.make_context(name, [], parent=parent, resilient_parsing=True)
        if hasattr(found.command, "get_command"):
            for inner in found.command.list_commands(found):
                yield from walk(f"{path} {inner}", inner, found.command.get_command(found, inner), found)
        else:
            yield path, found.command

    for name in root.list_commands(context):
        yield from walk(f"pegboard {name}", name, root.get_command(context, name), context)


def test_every_command_and_option_is_named() -> None:
    text = text_of("cli.md")
    found = dict(commands())
    assert len(found) >= 10
    for path, command in found.items():
        assert f"$ {path} " in text or f"$ {path}\n" in text, f"no example of {path}"
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert re.search(rf"{option}\b", text), f"{path}: {option}"


# -- all pages


def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if file in MADE and not file.exists():
            continue
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page.name}: {target}"


def test_the_readme_lists_the_rooms_that_are_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    layout = readme[readme.index("## Layout") : readme.index("## License")]
    for folder in ("core/pegboard", "plugins", "examples", "tests", "docs"):
        assert f"{folder}/" in layout
        assert (ROOT / folder).is_dir()
    for plugin in (ROOT / "plugins").iterdir():
        if plugin.is_dir():
            assert plugin.name in layout
    for room in re.findall(r"^    ([\w/ ]+/) ", layout, re.MULTILINE):
        for name in room.split():
            assert (ROOT / "core" / "pegboard" / name).is_dir(), name
