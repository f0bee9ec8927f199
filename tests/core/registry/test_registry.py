from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pegboard.contracts.part import Part
from pegboard.errors import ConfigError, PluginError
from pegboard.registry.parts import RegisteredPart
from pegboard.registry.registry import Registry

Install = Callable[..., str]


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    depth: int = 1


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    page_size: int = Field(default=16, ge=16)
    eviction: str = "lru"
    inner: Inner = Inner()


class Lax(BaseModel):
    page_size: int = 16


class Buggy(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = ""

    @field_validator("name")
    @classmethod
    def _bug(cls, value: str) -> str:
        return {}[value]


class Factory:
    @classmethod
    def refusals(cls, need: Any, options: Any) -> list[str]:
        return []

    @classmethod
    def create(cls, need: Any, options: Any) -> Factory:
        return cls()


def entry(
    role: str = "cache", name: str = "one", *, distribution: str | None = "some-dist", **fields: Any
) -> RegisteredPart:
    part = Part(**{"role": role, "name": name, "factory": Factory, "summary": "", **fields})
    return RegisteredPart(part=part, plugin="some", distribution=distribution, version="1.0")


def test_an_unknown_name_lists_the_valid_ones_and_the_nearest() -> None:
    registry = Registry([entry(name="paged"), entry(name="ring")])
    with pytest.raises(
        PluginError, match=r"no cache named 'pagged'; did you mean 'paged'\?; valid names: paged, ring"
    ) as e:
        registry.get("cache", "pagged")
    assert "install the distribution that provides it" in str(e.value)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(PluginError, match="did you mean 'cache'"):
        Registry([]).get("cach", "x")


def test_a_name_of_a_broken_plugin_gives_its_reason(install: Install) -> None:
    install(
        "bad-dist",
        "@hookimpl\ndef pegboard_parts():\n"
        "    return [Part(role='cache', name='fancy', factory='m:C', summary='', contract=99)]",
    )
    with pytest.raises(
        PluginError, match=r"cache 'fancy' is offered by .*bad-dist 1\.0, which is broken: .*version 99"
    ):
        Registry.discover().get("cache", "fancy")


def test_plugins_that_could_not_be_imported_are_suspects(install: Install) -> None:
    install("bad-dist", "import not_installed_anywhere")
    with pytest.raises(
        PluginError, match=r"bad-dist 1.0 is broken: ModuleNotFoundError: No module named 'not_installed"
    ):
        Registry.discover().get("cache", "fancy")


def test_an_ambiguous_name_names_both_distributions_and_hurts_no_other() -> None:
    registry = Registry([entry(distribution="first"), entry(distribution="second"), entry(name="two")])
    with pytest.raises(PluginError, match=r"ambiguous: offered by .*first 1.0 and .*second 1.0"):
        registry.get("cache", "one")
    assert registry.get("cache", "two").part.name == "two"


def test_first_party_is_the_distribution_pegboard_only() -> None:
    assert entry(distribution="Pegboard").first_party
    assert not entry(distribution="pegboard-extras").first_party
    assert not entry(distribution=None).first_party


def test_allow_compares_normalised_names() -> None:
    part = entry(distribution="Some_Dist")
    assert not part.allowed([])
    assert not part.allowed(["other"])
    assert part.allowed(["some-dist"])
    assert entry(distribution=None).allowed([])


def test_matching_finds_what_recognises_a_key() -> None:
    registry = Registry(
        [
            entry("model", "llama", distribution="pegboard", matches=("Llama", "Mistral")),
            entry("model", "better", distribution=None, matches=("Llama",), priority=5),
        ]
    )
    assert registry.matching("model", "Mistral").part.name == "llama"
    assert registry.matching("model", "Llama").part.name == "better"
    with pytest.raises(
        PluginError, match=r"no model recognises 'Lama'; did you mean 'Llama'\?; supported: Llama, Mistral"
    ):
        registry.matching("model", "Lama")


def test_matching_does_not_activate_what_is_not_allowed() -> None:
    registry = Registry([entry("model", "third", distribution="third-dist", matches=("Odd",))])
    with pytest.raises(PluginError, match=r"'third' .* is not allowed: add 'third-dist' to plugins.allow"):
        registry.matching("model", "Odd")
    assert registry.matching("model", "Odd", ["third-dist"]).part.name == "third"


def test_matching_an_ambiguous_part_names_both() -> None:
    registry = Registry([entry("model", "m", distribution=d, matches=("Odd",)) for d in ("pegboard", None)])
    with pytest.raises(PluginError, match="ambiguous"):
        registry.matching("model", "Odd")


def test_load_imports_lazily(install: Install) -> None:
    module = install(
        "lazy-dist",
        """
        @hookimpl
        def pegboard_parts():
            return [Part(role="cache", name="lazy", factory="{module}_impl:Outer.Cache", summary="")]
        """,
    )
    part = Registry.discover().get("cache", "lazy")
    with pytest.raises(
        PluginError, match=f"'lazy' of plugin 'main' of distribution lazy-dist.*No module named '{module}_impl'"
    ) as e:
        part.load()
    assert isinstance(e.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("json:JSONDecodr", "no 'JSONDecodr' in json; did you mean 'JSONDecoder'"),
        ("json:dumps", "class method refusals of CacheManager is not implemented"),
        ("pegboard.contracts.cache:CacheManager", "class method create of CacheManager is not implemented"),
    ],
)
def test_load_says_what_is_missing(factory: str, reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        entry(factory=factory).load()


def test_load_finds_a_forgotten_classmethod() -> None:
    class Forgot(Factory):
        def create(self, need: Any, options: Any) -> Any:  # type: ignore[override]
            return self

    with pytest.raises(PluginError, match="create must be a class method"):
        entry(factory=Forgot).load()


def test_load_knows_each_role() -> None:
    class Reader:
        @classmethod
        def recognises(cls, path: Any) -> bool:
            return True

        @classmethod
        def open(cls, path: Any) -> Any:
            return cls()

    assert entry("checkpoint", factory=Reader).load() is Reader
    assert entry("observer").load() is Factory
    with pytest.raises(PluginError, match="layouts of AttentionBackend"):
        entry("attention").load()
    with pytest.raises(PluginError, match="describe of DecoderModel"):
        entry("model").load()


def test_a_factory_that_exits_at_import_is_a_plugin_error(install: Install) -> None:
    module = install("exit-dist", "raise SystemExit(1)", header=False)
    with pytest.raises(PluginError, match="SystemExit: 1"):
        entry(factory=f"{module}:X").load()


def test_options_are_validated_with_defaults() -> None:
    options = entry(options=Options).options({"eviction": "fifo"})
    assert options == Options(page_size=16, eviction="fifo")


def test_every_wrong_option_is_named_by_path_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError) as e:
        entry(options=Options).options({"page_sise": 16, "zzz": 1, "eviction": 3, "inner": {"dept": 2}})
    reasons = "\n".join(e.value.reasons)
    assert len(e.value.reasons) == 4
    assert "cache.options.page_sise: unknown key; did you mean 'page_size'?" in reasons
    assert "cache.options.zzz: unknown key; valid keys: eviction, inner, page_size" in reasons
    assert "cache.options.eviction: input should be a valid string, got 3" in reasons
    assert "cache.options.inner.dept: unknown key; did you mean 'depth'?" in reasons


def test_the_path_of_options_can_be_another_field() -> None:
    with pytest.raises(
        ConfigError, match=r"decode_attention\.options\.page_size: .*greater than or equal to 16, got 8"
    ):
        entry(options=Options).options({"page_size": 8}, "decode_attention.options")


def test_a_part_without_options_takes_none() -> None:
    assert entry().options({}) is None
    with pytest.raises(ConfigError, match=r"cache.options.x: cache part 'one' takes no options"):
        entry().options({"x": 1})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Lax, 'extra="forbid"'),
        (int, "is no pydantic model"),
        ("json:Nope", "no 'Nope' in json"),
        (Buggy, "raised KeyError"),
    ],
)
def test_a_faulty_options_model_is_the_plugins_fault(model: Any, reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        entry(options=model).options({"name": "x"} if model is Buggy else {})
