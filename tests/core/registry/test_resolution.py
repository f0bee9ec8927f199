from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict

from pegboard.config import PartChoice
from pegboard.contracts.checkpoint import CheckpointNeed
from pegboard.contracts.part import Part
from pegboard.errors import ConfigError, PluginError
from pegboard.registry.parts import RegisteredPart
from pegboard.registry.registry import Registry
from pegboard.registry.report import decisions_data, decisions_text
from pegboard.registry.resolution import Decision, resolve, winner

Install = Callable[..., str]
NEED = object()


class Factory:
    reasons: Any = ()
    asked: Any = None

    @classmethod
    def refusals(cls, need: Any, options: Any) -> Any:
        cls.asked = (need, options)
        return cls.reasons

    @classmethod
    def create(cls, need: Any, options: Any) -> Factory:
        return cls()


def factory(answer: Any) -> type[Factory]:
    return type("Made", (Factory,), {"reasons": answer})


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    page_size: int = 16


def entry(name: str, *, distribution: str | None = "pegboard", role: str = "cache", **fields: Any) -> RegisteredPart:
    part = Part(**{"role": role, "name": name, "factory": Factory, "summary": "", **fields})
    return RegisteredPart(part=part, plugin=f"{name}-plugin", distribution=distribution, version="1.0")


def decide(
    entries: Sequence[RegisteredPart], use: str = "auto", need: Any = NEED, options: Any = None, **changes: Any
) -> Decision:
    settings = {"device_type": "cpu", "objective": "throughput", "allow": ()} | changes
    return resolve(Registry(entries), "cache", PartChoice(use=use, options=options or {}), need, **settings)


def verdicts(decision: Decision) -> list[tuple[str, str]]:
    return [(candidate.name, candidate.verdict) for candidate in decision.candidates]


def reasons_of(decision: Decision, name: str) -> str:
    return "\n".join(next(c for c in decision.candidates if c.name == name).reasons)


def test_auto_takes_the_highest_score_for_the_objective() -> None:
    entries = [
        entry("a", priority=1),
        entry("b", priority=2),
        entry("c", objectives={"latency": 5}),
        entry("d", priority=2),
    ]
    decision = decide(entries)
    assert decision.winner == "b"  # equal scores: by name
    assert [c.name for c in decision.candidates] == ["b", "d", "a", "c"]
    assert verdicts(decision)[1:] == [("d", "eligible"), ("a", "eligible"), ("c", "eligible")]
    assert decide(entries, objective="latency").winner == "c"
    assert decision.reasons_text() == ""


def test_auto_asks_each_until_one_can() -> None:
    entries = [entry("a", priority=2, factory=factory(["head size 80 is not supported"])), entry("b", priority=1)]
    decision = decide(entries)
    assert verdicts(decision) == [("a", "refused"), ("b", "chosen")]
    assert reasons_of(decision, "a") == "head size 80 is not supported"


def test_need_and_validated_options_reach_the_factory() -> None:
    made = factory([])
    assert decide([entry("a", factory=made, options=Options)], options={"page_size": 32}).winner == "a"
    assert made.asked == (NEED, Options(page_size=32))


def test_losers_are_not_imported() -> None:
    decision = decide([entry("a", priority=1), entry("b", factory="not_installed_anywhere:X")])
    assert verdicts(decision) == [("a", "chosen"), ("b", "eligible")]


def test_without_a_need_no_factory_is_imported() -> None:
    assert decide([entry("a", factory="not_installed_anywhere:X")], need=None).winner == "a"
    assert decide([entry("a", factory=factory(["no"]))], need=None).winner == "a"


def test_observers_have_no_need_and_are_asked_all_the_same() -> None:
    assert decide([entry("a", factory=factory(["no"]))], need=None, static=False).winner is None


def test_others_are_available_but_not_allowed() -> None:
    entries = [entry("ours"), entry("theirs", distribution="their-dist", priority=99)]
    decision = decide(entries)
    assert verdicts(decision) == [("ours", "chosen"), ("theirs", "not allowed")]
    assert "available, not allowed: add 'their-dist' to plugins.allow" in reasons_of(decision, "theirs")
    assert decide(entries, allow=["Their_Dist"]).winner == "theirs"
    assert decide(entries, use="theirs").winner == "theirs"  # naming it is enough


def test_an_object_passed_directly_is_considered() -> None:
    assert decide([entry("ours"), entry("mine", distribution=None, priority=1)]).winner == "mine"


def test_only_not_allowed_candidates_is_no_winner_and_says_how_to_allow() -> None:
    decision = decide([entry("theirs", distribution="their-dist")])
    assert decision.winner is None
    assert "plugins.allow" in decision.reasons_text()


def test_device_mismatch() -> None:
    decision = decide([entry("gpu", devices=("cuda",))], use="gpu")
    assert (decision.winner, verdicts(decision)) == (None, [("gpu", "refused")])
    assert decision.reasons_text() == "cache = 'gpu': runs on cuda, not on cpu"
    assert decide([entry("gpu", devices=("cuda",))], device_type="cuda").winner == "gpu"
    assert decide([entry("gpu", devices=("cuda",))], device_type="auto", need=None).winner == "gpu"


def test_missing_dependency() -> None:
    decision = decide([entry("a", requires=("json", "not_installed_anywhere")), entry("b", requires=("json.decoder",))])
    assert verdicts(decision) == [("a", "refused"), ("b", "chosen")]
    assert "needs not_installed_anywhere, which can't be imported" in reasons_of(decision, "a")
    assert decide([entry("a", requires=("json.nothing",))]).winner is None
    assert decide([entry("a", requires=("nothing_at_all.sub",))]).winner is None
    assert decide([entry("a", requires=("json.decoder.sub",))]).winner is None
    told = decide([entry("a", requires=("not_installed_anywhere",), install="pip install it")])
    assert reasons_of(told, "a").endswith("which can't be imported here: pip install it")


def test_a_dependency_is_looked_for_without_importing_its_parents(install: Install) -> None:
    module = install("side-dist", "raise SystemExit('imported')", header=False)
    assert decide([entry("a", requires=(f"{module}.part",))]).winner is None


@pytest.mark.parametrize("error", [ValueError("odd shape"), KeyError("x"), SystemExit(2)])
def test_an_exception_in_refusals_is_a_refusal(error: BaseException) -> None:
    class Raises(Factory):
        @classmethod
        def refusals(cls, need: Any, options: Any) -> Any:
            raise error

    decision = decide([entry("a", priority=1, factory=Raises), entry("b")])
    assert verdicts(decision) == [("a", "refused"), ("b", "chosen")]
    assert f"raised {type(error).__name__}: {error}" in reasons_of(decision, "a")


@pytest.mark.parametrize("answer", [None, "a text", [1], 3, {"a": 1}])
def test_a_wrong_answer_of_refusals_is_a_refusal(answer: Any) -> None:
    decision = decide([entry("a", factory=factory(answer))])
    assert decision.winner is None
    assert f"returned {answer!r}, not a list of texts" in decision.reasons_text()


def test_wrong_options_are_a_refusal_with_path() -> None:
    decision = decide([entry("a", options=Options)], use="a", options={"page_sise": 32}, need=None)
    assert decision.reasons == ("cache.options.page_sise: unknown key; did you mean 'page_size'?",)
    elsewhere = decide([entry("a", options=Options)], options={"page_sise": 32}, where="draft_cache")
    assert elsewhere.where == "draft_cache"
    assert elsewhere.reasons == ("draft_cache.options.page_sise: unknown key; did you mean 'page_size'?",)


def test_a_factory_that_cannot_be_imported_is_broken() -> None:
    decision = decide([entry("a", priority=1, factory="not_installed_anywhere:X"), entry("b")])
    assert verdicts(decision) == [("a", "broken"), ("b", "chosen")]
    named = decide([entry("a", factory="not_installed_anywhere:X"), entry("b")], use="a")
    assert named.winner is None
    assert "No module named 'not_installed_anywhere'" in named.reasons_text()


def test_an_unknown_name_has_reasons_and_lists_the_others() -> None:
    decision = decide([entry("paged")], use="pagd")
    assert verdicts(decision) == [("pagd", "refused"), ("paged", "eligible")]
    assert "did you mean 'paged'" in decision.reasons_text()


def test_a_name_of_a_broken_plugin_is_broken(install: Install) -> None:
    install(
        "bad-dist",
        "@hookimpl\ndef pegboard_parts():\n"
        "    return [Part(role='cache', name='fancy', factory='m:C', summary='', contract=99)]",
    )
    registry = Registry.discover()
    choice = PartChoice(use="fancy")
    decision = resolve(registry, "cache", choice, None, device_type="cpu", objective="latency", allow=())
    assert decision.candidates[0].verdict == "broken"
    assert decision.candidates[0].distribution == "bad-dist"
    assert "version 99" in decision.reasons_text()
    automatic = resolve(registry, "cache", PartChoice(), None, device_type="cpu", objective="latency", allow=())
    assert automatic.winner == "paged"


def test_ambiguity_is_fatal_only_to_a_config_that_names_it() -> None:
    entries = [entry("paged"), entry("paged", distribution="squatter")]
    named = decide(entries, use="paged")
    assert verdicts(named) == [("paged", "ambiguous")] * 2
    assert "pegboard 1.0 and" in named.reasons_text()
    assert "squatter 1.0" in named.reasons_text()
    automatic = decide(entries)
    assert verdicts(automatic) == [("paged", "chosen"), ("paged", "not allowed")]
    assert winner(Registry(entries), automatic).distribution == "pegboard"
    with pytest.raises(PluginError, match="no cache named 'paged' from plugin 'paged-plugin' of distribution pegboard"):
        winner(Registry(entries[1:]), automatic)
    assert verdicts(decide(entries, allow=["squatter"])) == [("paged", "ambiguous")] * 2


def test_a_key_must_be_recognised() -> None:
    entries = [entry("awq", matches=("awq",)), entry("none", matches=("none",)), entry("blank")]
    decision = decide(entries, key="none")
    assert decision.winner == "none"
    assert reasons_of(decision, "awq") == "recognises awq, not none"
    assert "recognises nothing" in reasons_of(decision, "blank")
    assert decide(entries, use="awq", key="none").reasons_text() == "cache = 'awq': recognises awq, not none"
    assert decide(entries, use="blank", key="none").winner == "blank"  # its own refusals decide


def test_a_checkpoint_is_asked_about_the_path(tmp_path: Path) -> None:
    class Reader:
        @classmethod
        def recognises(cls, path: Path) -> bool:
            return path.suffix == ".odd"

        @classmethod
        def open(cls, path: Path) -> Reader:
            return cls()

    registry = Registry([entry("odd", role="checkpoint", factory=Reader)])
    settings: dict[str, Any] = {"device_type": "cpu", "objective": "latency", "allow": ()}
    right = resolve(registry, "checkpoint", PartChoice(), CheckpointNeed(path=tmp_path / "x.odd"), **settings)
    wrong = resolve(registry, "checkpoint", PartChoice(), CheckpointNeed(path=tmp_path / "x.bin"), **settings)
    assert right.winner == "odd"
    assert "does not recognise" in wrong.reasons_text()


def test_no_candidates_at_all_says_so_and_names_broken_plugins(install: Install) -> None:
    install("bad-dist", "import not_installed_anywhere")
    broken = [plugin for plugin in Registry.discover().broken if plugin.distribution == "bad-dist"]
    settings: dict[str, Any] = {"device_type": "cpu", "objective": "latency", "allow": ()}
    decision = resolve(Registry([], broken), "sampler", PartChoice(), None, **settings)
    assert decision.candidates == ()
    assert "no plugin offers a part for the role sampler" in decision.reasons_text()
    assert "bad-dist" in decision.reasons_text()


def test_winner_without_one_raises_all_reasons() -> None:
    decision = decide([entry("a", factory=factory(["first", "second"]))], use="a")
    with pytest.raises(ConfigError) as e:
        winner(Registry([]), decision)
    assert e.value.reasons == ("cache = 'a': first", "cache = 'a': second")


def test_decisions_go_through_json_and_text() -> None:
    decision = decide([entry("a", factory=factory(["too small"])), entry("b", priority=-1)])
    data = json.loads(json.dumps(decisions_data([decision])))
    assert msgspec.convert(data["decisions"], list[Decision]) == [decision]
    text = decisions_text([decision])
    for word in ("cache: b", "refused", "too small", "chosen", "score -1"):
        assert word in text


def test_what_is_made_for_other_keys_says_only_what_there_is() -> None:
    entries = [
        entry("a", matches=("awq", "none")),
        entry("b", matches=("gptq",), devices=("cuda",)),
        entry("c", matches=("none",), factory=factory(["no"])),
        entry("d", matches=("none",), factory=factory(["no, too"])),
    ]
    assert decide(entries, key="fp8").reasons_text() == (
        "cache: no part here recognises fp8; recognised are awq, gptq, none"
    )
    assert decide(entries[1:], key="none").reasons_text() == "cache = 'c': no\ncache = 'd': no, too"
