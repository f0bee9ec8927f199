from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard.contracts.part import CONTRACT_VERSIONS, Part
from pegboard.registry.hookspecs import hookimpl
from pegboard.registry.parts import BrokenPlugin
from pegboard.registry.registry import Registry

Install = Callable[..., str]

GOOD = """
@hookimpl
def pegboard_parts():
    return [Part(role="cache", name="good", factory="{module}:Cache", summary="Good")]
"""


def parts_returning(expression: str) -> str:
    return f"@hookimpl\ndef pegboard_parts():\n    return {expression}\n"


def part(**changes: object) -> str:
    fields = {"role": "cache", "name": "one", "factory": "m:C", "summary": "One"} | changes
    return "Part(" + ", ".join(f"{key}={value!r}" for key, value in fields.items()) + ")"


def only_broken(registry: Registry, distribution: str) -> BrokenPlugin:
    (found,) = [plugin for plugin in registry.broken if plugin.distribution == distribution]
    assert not any(
        entry.distribution == distribution for role in CONTRACT_VERSIONS for entry in registry.parts(role)
    ), "a broken plugin must register nothing"
    return found


def test_a_plugin_is_found_by_its_entry_point_with_its_source(install: Install) -> None:
    install("good-dist", GOOD, version="2.5", plugin="good")
    entry = Registry.discover().get("cache", "good")
    assert (entry.plugin, entry.distribution, entry.version) == ("good", "good-dist", "2.5")
    assert not entry.first_party


def test_the_core_comes_through_the_same_door() -> None:
    registry = Registry.discover()
    assert registry.broken == ()
    assert registry.get("ops", "torch").plugin == "builtin"
    assert registry.get("executor", "local").first_party
    offered = {(role, entry.part.name) for role in CONTRACT_VERSIONS for entry in registry.parts(role)}
    assert offered >= {
        ("attention", "torch"),
        ("cache", "paged"),
        ("scheduler", "continuous"),
        ("scheduler", "static"),
        ("sampler", "torch"),
        ("quantizer", "none"),
        ("model", "llama"),
        ("checkpoint", "safetensors"),
        ("checkpoint", "gguf"),
        ("checkpoint", "random"),
    }


def test_entry_points_can_be_left_out() -> None:
    registry = Registry.discover(entry_points=False)
    assert all(registry.parts(role) == () for role in CONTRACT_VERSIONS)


@pytest.mark.parametrize(
    ("source", "reason", "raised"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'", True),
        ("def broken(:", "SyntaxError", True),
        ("1 / 0", "ZeroDivisionError: division by zero", True),
        ("import sys\nsys.exit(3)", "SystemExit: 3", True),
        ("raise BaseException('odd')", "BaseException: odd", True),
        (
            "@hookimpl\ndef pegboard_part():\n    return []",
            "unknown hook 'pegboard_part'; did you mean 'pegboard_parts'?",
            0,
        ),
        ("@hookimpl\ndef pegboard_parts(config):\n    return []", "Argument(s) {'config'}", False),
        ("def pegboard_parts():\n    return []", "no function pegboard_parts marked", False),
        ("@hookimpl\ndef pegboard_parts():\n    raise KeyError('inside')", "KeyError: 'inside'", True),
        (parts_returning("None"), "returned None", False),
        (parts_returning("'text'"), "returned str, not a list or tuple of Part", True),
        (parts_returning("{1: 2}"), "returned dict, not a list or tuple of Part", True),
        (parts_returning("[object()]"), "returned object at index 0, not Part", True),
        (parts_returning(f"[{part(role='cahce')}]"), "unknown role; did you mean 'cache'?", False),
        (parts_returning(f"[{part(role=3)}]"), "unknown role", False),
        (parts_returning(f"[{part(name='auto')}]"), "'auto' is taken", False),
        (parts_returning(f"[{part(name='')}]"), "name must consist of", False),
        (parts_returning(f"[{part(factory='no_colon')}]"), "factory 'no_colon' is no import path", False),
        (parts_returning(f"[{part(factory='m:')}]"), "is no import path", False),
        (parts_returning(f"[{part(options='m.C')}]"), "options 'm.C' is no import path", False),
        (
            parts_returning("[Part(role='cache', name='x', factory=int, summary='')]"),
            "factory must be an import path",
            0,
        ),
        (parts_returning(f"[{part(requires='triton')}]"), "requires must be a tuple of strings", False),
        (parts_returning(f"[{part(objectives={'speed': 1})}]"), "objectives may map latency", False),
        (parts_returning(f"[{part(priority='high')}]"), "priority must be an integer", False),
        (parts_returning(f"[{part()}, {part()}]"), "declared twice by this plugin", False),
    ],
)
def test_a_misbehaving_plugin_is_listed_and_stops_nobody(
    install: Install, source: str, reason: str, raised: bool
) -> None:
    install("bad-dist", source, version="9.1", plugin="bad")
    install("good-dist", GOOD)
    registry = Registry.discover()
    broken = only_broken(registry, "bad-dist")
    assert reason in broken.reason
    assert (broken.plugin, broken.version) == ("bad", "9.1")
    assert bool(broken.traceback) == raised
    assert registry.get("cache", "good").distribution == "good-dist"
    assert registry.get("cache", "paged").first_party


def test_the_traceback_shows_where_a_manifest_failed(install: Install) -> None:
    module = install("bad-dist", "def inner():\n    raise RuntimeError('deep')\ninner()")
    broken = only_broken(Registry.discover(), "bad-dist")
    assert f"{module}.py" in broken.traceback
    assert "in inner" in broken.traceback


def test_keyboard_interrupt_is_not_swallowed(install: Install) -> None:
    install("bad-dist", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Registry.discover()


@pytest.mark.parametrize("offset", [1, -2])
def test_a_contract_mismatch_names_plugin_distribution_wanted_and_offered(install: Install, offset: int) -> None:
    offered = CONTRACT_VERSIONS["cache"] + offset
    install("other-dist", parts_returning(f"[{part(contract=offered)}]"), version="3", plugin="other")
    reason = only_broken(Registry.discover(), "other-dist").reason
    for word in (
        "'other'",
        "other-dist 3",
        f"version {offered} of the cache contract",
        f"wants {CONTRACT_VERSIONS['cache']}",
    ):
        assert word in reason


def test_the_version_before_is_accepted(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    monkeypatch.setattr("pegboard.registry.descriptors.CONTRACT_VERSIONS", dict(CONTRACT_VERSIONS) | {"cache": 5})
    install("old-dist", parts_returning(f"[{part(contract=4)}]"))
    install("new-dist", parts_returning(f"[{part(name='two', contract=5)}]"))
    install("older-dist", parts_returning(f"[{part(name='three', contract=3)}]"))
    registry = Registry.discover()
    assert registry.get("cache", "one").part.contract == 4
    assert registry.get("cache", "two").part.contract == 5
    assert "wants 4 or 5" in only_broken(registry, "older-dist").reason


def test_registration_is_atomic(install: Install) -> None:
    install("half-dist", parts_returning(f"[{part()}, {part(name='two', factory='bad')}]"))
    registry = Registry.discover()
    assert only_broken(registry, "half-dist").parts == (("cache", "one"), ("cache", "two"))


def test_all_problems_of_a_plugin_are_told_at_once(install: Install) -> None:
    install("bad-dist", parts_returning(f"[{part(factory='bad', contract=99)}, {part(name='two', role='nope')}]"))
    reason = only_broken(Registry.discover(), "bad-dist").reason
    assert "is no import path" in reason
    assert "version 99" in reason
    assert "unknown role" in reason


def test_a_name_offered_by_two_distributions_is_ambiguous(install: Install) -> None:
    install("first-dist", parts_returning(f"[{part()}]"), plugin="a")
    install("second-dist", parts_returning(f"[{part()}, {part(name='other')}]"), plugin="b")
    registry = Registry.discover()
    assert {entry.distribution for entry in registry.ambiguous["cache", "one"]} == {"first-dist", "second-dist"}
    assert registry.get("cache", "other").distribution == "second-dist"


def test_damaged_metadata_of_a_plugin_is_listed(install: Install, tmp_path: Path) -> None:
    module = install("bad-dist", GOOD)
    (tmp_path / module / "bad_dist-1.0.dist-info" / "entry_points.txt").write_text("[pegboard]\nno equals sign\n")
    install("good-dist", GOOD)
    registry = Registry.discover()
    assert "metadata can't be read" in only_broken(registry, "bad-dist").reason
    assert registry.get("cache", "good").distribution == "good-dist"


def test_undecodable_metadata_stops_nobody(install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = install("bad-dist", GOOD)
    (tmp_path / module / "bad_dist-1.0.dist-info" / "entry_points.txt").write_bytes(b"[pegboard]\n\xff\xfe = x\n")
    with caplog.at_level(logging.WARNING, "pegboard"):
        assert Registry.discover().get("ops", "torch")
    assert "damaged metadata" in caplog.text


def test_a_distribution_shadowed_on_the_path_is_not_seen(install: Install) -> None:
    install("same-dist", parts_returning(f"[{part(summary='old')}]"), version="1.0")
    install("same_dist", parts_returning(f"[{part(summary='new')}]"), version="2.0")
    registry = Registry.discover()
    assert registry.get("cache", "one").part.summary == "new"


def test_a_slow_or_heavy_manifest_is_reported(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pegboard.registry.discovery.SLOW_SECONDS", 0.02)
    monkeypatch.setattr("pegboard.registry.discovery.HEAVY", ("heavy_thing",))
    monkeypatch.setitem(sys.modules, "heavy_thing", None)
    monkeypatch.delitem(sys.modules, "heavy_thing")
    install("slow-dist", "import time, sys\ntime.sleep(0.05)\nsys.modules['heavy_thing'] = sys" + GOOD)
    with caplog.at_level(logging.WARNING, "pegboard"):
        Registry.discover()
    assert "of distribution slow-dist 1.0 took" in caplog.text
    assert "imports heavy_thing" in caplog.text


class Passed:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [Part(role="cache", name="mine", factory=Passed, summary="Mine")]


class Misspelt:
    @hookimpl
    def pegboard_prats(self) -> list[Part]:
        return []


def test_an_object_is_a_plugin_and_may_hold_classes() -> None:
    registry = Registry.discover([Passed()], entry_points=False)
    entry = registry.get("cache", "mine")
    assert (entry.plugin, entry.distribution, entry.version) == ("Passed", None, None)
    assert entry.allowed(())


def test_a_broken_object_is_listed_apart() -> None:
    registry = Registry.discover([Misspelt(), Passed()], entry_points=False)
    (broken,) = registry.broken_objects
    assert "did you mean 'pegboard_parts'" in broken.reason
    assert registry.get("cache", "mine")


def test_registries_share_nothing() -> None:
    one, two = Registry.discover([Passed()], entry_points=False), Registry.discover(entry_points=False)
    assert len(one.parts("cache")) == 1
    assert two.parts("cache") == ()
