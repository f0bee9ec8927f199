from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.contracts.observer import Observer
from pegboard.contracts.ops import Ops
from pegboard.contracts.part import ROLES
from pegboard.registry.interfaces import INTERFACES, class_methods, contract_problems, missing_class_methods


def complete(role: str, **changes: Any) -> type:
    """A class that forwards every abstract method with the contract's own signature, then `changes`."""
    interface = INTERFACES[role]
    members = {}
    for name in interface.__abstractmethods__:  # type: ignore[attr-defined]
        found = vars(interface)[name]
        if isinstance(found, property):
            members[name] = property(lambda self: None)
        elif isinstance(found, classmethod):
            members[name] = classmethod(_copy(found.__func__))
        else:
            members[name] = _copy(found)
    return type("Complete", (interface,), members | changes)


def _copy(function: Any) -> Any:
    import types

    code = function.__code__
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def test_every_role_has_an_interface() -> None:
    assert set(INTERFACES) == set(ROLES)


def test_each_role_asks_for_the_class_methods_of_its_contract() -> None:
    assert set(class_methods("cache")) == {"refusals", "create"}
    assert set(class_methods("attention")) == {"refusals", "create", "layouts"}
    assert set(class_methods("model")) == {"refusals", "describe", "create"}
    assert set(class_methods("checkpoint")) == {"recognises", "open"}


@pytest.mark.parametrize("role", ROLES)
def test_a_complete_class_has_no_problem(role: str) -> None:
    assert contract_problems(role, complete(role)) == []


@pytest.mark.parametrize("role", [role for role in ROLES if role != "observer"])
def test_each_missing_method_is_named(role: str) -> None:
    interface = INTERFACES[role]
    instance_methods = sorted(set(interface.__abstractmethods__) - set(class_methods(role)))  # type: ignore[attr-defined]
    for name in instance_methods:
        lacking = complete(role, **{name: vars(interface)[name]})
        assert contract_problems(role, lacking) == [f"{name} of {interface.__name__} is not implemented"]


def test_a_method_that_takes_too_little_or_too_much_is_found() -> None:
    def gated(self: Any, x: Any) -> Any: ...

    def norm(self: Any, x: Any, norm: Any, residual: Any) -> Any: ...  # residual must be optional

    def project(self: Any, x: Any, linear: Any, **options: Any) -> Any: ...  # fine: takes all by name

    problems = contract_problems("ops", complete("ops", gated=gated, norm=norm, project=project))
    assert len(problems) == 2
    assert problems[0].startswith("gated can't be called as gated(self, x, activation)")
    assert problems[1].startswith("norm can't be called as norm(self, x, norm, residual=None)")


def test_more_optional_arguments_are_fine() -> None:
    def gated(self: Any, x: Any, activation: Any, out: Any = None) -> Any: ...

    assert contract_problems("ops", complete("ops", gated=gated)) == []


def test_create_with_the_wrong_arguments_is_found() -> None:
    class Wrong(Observer):
        @classmethod
        def refusals(cls, need: None, options: Any) -> Sequence[str]:
            return ()

        @classmethod
        def create(cls) -> Wrong:  # type: ignore[override]
            return cls()

    (problem,) = contract_problems("observer", Wrong)
    assert problem.startswith("create can't be called as create(need, options)")


def test_an_object_that_makes_parts_needs_the_class_methods_only() -> None:
    class Maker:
        def refusals(self, need: Any, options: Any) -> list[str]:
            return []

        def create(self, need: Any, options: Any) -> Ops:
            raise NotImplementedError

    assert missing_class_methods("ops", Maker()) == []
    assert contract_problems("ops", Maker()) == []
    assert missing_class_methods("ops", Maker) == [
        "refusals must be a class method: mark it @classmethod",
        "create must be a class method: mark it @classmethod",
    ]
