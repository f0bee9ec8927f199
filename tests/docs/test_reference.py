"""docs/reference.md is what the code says, and every method of a contract is called by its role's conformance suite."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest

from pegboard.contracts.part import ROLES
from pegboard.registry.hookspecs import ObserverSpec, PluginSpec
from pegboard.registry.interfaces import INTERFACES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference.md"
SUITES = ROOT / "core" / "pegboard" / "testing"

#: Where a role without a conformance suite is tested.
ELSEWHERE = dict.fromkeys(("executor", "observer"), ROOT / "tests" / "core")
#: Methods that a suite reaches through the engine's own code, and where they are tested by name.
INDIRECT = {
    ("cache", "observe_score_mass"): ROOT / "tests",
    ("model", "unused_tensors"): ROOT / "tests",
}


def test_the_page_is_made_from_the_code() -> None:
    made = runpy.run_path(str(Path(__file__).with_name("reference.py")))["reference"]()
    assert PAGE.read_text(encoding="utf-8") == made, "run `make reference`"


@pytest.mark.parametrize("role", ROLES)
def test_every_contract_method_stands_there_with_its_exact_signature(role: str) -> None:
    """Read from the page itself, not through what made it."""
    interface = INTERFACES[role]
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index(f"### {role}, version") :].partition("\n### ")[0]
    for name, value in vars(interface).items():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        [line] = [line for line in part.splitlines() if re.search(rf"(^|\s){name}\(", line)]
        for parameter in inspect.signature(function).parameters.values():
            assert re.search(rf"[(, *]{parameter.name}\b", line), f"{role}.{name}: {parameter}"
        assert line.partition("  #")[0].endswith(str(inspect.signature(function).return_annotation).strip("'"))


def test_every_hook_stands_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for spec in (PluginSpec, ObserverSpec):
        for name in (name for name in vars(spec) if name.startswith("pegboard_")):
            assert f"\n{name}(self" in text


@pytest.mark.parametrize("role", ROLES)
def test_every_contract_method_has_a_test(role: str) -> None:
    """It is named where the role's parts are held against the contract."""
    names = [
        name
        for name, value in vars(INTERFACES[role]).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod | property))
    ]
    assert names
    for name in names:
        place = INDIRECT.get((role, name)) or ELSEWHERE.get(role)
        files = [*SUITES.glob(f"{role}*.py"), SUITES / "conformance.py"]
        if place is not None:
            files = list(place.rglob("*.py"))
        assert any(re.search(rf"\.{name}\b", file.read_text(encoding="utf-8")) for file in files), f"{role}.{name}"
