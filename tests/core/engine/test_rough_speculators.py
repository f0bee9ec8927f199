"""Speculators that do not heed the fine print: what harms nobody changes no token, all else is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch

from pegboard import ConfigError, Engine, Part, PluginError, RequestOutput, SamplingParams, hookimpl
from pegboard.contracts.sampler import SlotOpening
from pegboard.contracts.speculator import DraftContext, Drafts, Speculator, SpeculatorNeed, SpeculatorSpec


class Rough(Speculator):
    """Gives what `give` makes for so many rows, whatever is wanted."""

    spec: ClassVar[Any] = SpeculatorSpec(drafts=3)
    give: ClassVar[Callable[[int], Any]]

    @classmethod
    def refusals(cls, need: SpeculatorNeed, options: Any) -> Sequence[str]:
        return []

    @classmethod
    def describe(cls, need: SpeculatorNeed, options: Any) -> SpeculatorSpec:
        found: SpeculatorSpec = cls.spec
        return found

    @classmethod
    def create(cls, need: SpeculatorNeed, options: Any) -> Self:
        return cls()

    def open(self, openings: Sequence[SlotOpening]) -> None: ...

    def propose(self, context: DraftContext) -> Drafts:
        made: Drafts = type(self).give(len(context.slots))
        return made

    def observe(self, slots: torch.Tensor, ids: torch.Tensor, count: torch.Tensor) -> None: ...


def answers(model: Path, factory: Any = None, **settings: Any) -> list[RequestOutput]:
    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> Any:
            return (Part(role="speculator", name="rough", factory=factory, summary="for tests"),)

    if factory is not None:
        settings |= {"plugins": [Plugin()], "speculator": "rough", "adapt_drafts": False}
    with Engine(model, device="cpu", **settings) as engine:
        sampling = [SamplingParams(temperature=t, seed=5, max_tokens=9, ignore_eos=True) for t in (0.0, 0.9)]
        handles = [engine.submit([5, 6, 7], one) for one in sampling]
        return [handle.result() for handle in handles]


def rough(give: Callable[[int], Any], spec: Any = SpeculatorSpec(drafts=3)) -> type[Rough]:  # noqa: B008
    return type("Rough", (Rough,), {"give": staticmethod(give), "spec": spec})


def ids(rows: int, *row: int) -> torch.Tensor:
    return torch.tensor([row] * rows)


TREE = SpeculatorSpec(drafts=3, depth=2)


@pytest.mark.parametrize(
    "factory",
    [
        rough(lambda n: Drafts(ids=ids(n, 8, 9, 10))),
        rough(lambda n: Drafts(ids=ids(n, *range(9)))),
        rough(lambda n: Drafts(ids=ids(n, 9999, 211, 5))),
        rough(lambda n: Drafts(ids=ids(n, -5, 3, 1 << 40))),
        rough(lambda n: Drafts(ids=ids(n, 4, 5, 6), parents=ids(n, 0, 1, 0)), TREE),
        rough(lambda n: Drafts(ids=ids(n, 4, 5, 6, 7), parents=ids(n, -1, 9, 3, 0)), TREE),
    ],
    ids=["always all", "too many", "no tokens", "negative", "a tree", "a tree of strange parents"],
)
def test_what_harms_nobody_changes_no_token(tiny_path: Path, factory: type[Rough]) -> None:
    """To the last token, before which fewer drafts are wanted."""
    expected = [output.raise_for_error().token_ids for output in answers(tiny_path)]
    assert [output.raise_for_error().token_ids for output in answers(tiny_path, factory)] == expected


@pytest.mark.parametrize(
    ("give", "word"),
    [
        (lambda n: None, "gave NoneType, must give Drafts"),
        (lambda n: ids(n, 1, 2, 3), "gave Tensor, must give Drafts"),
        (lambda n: Drafts(ids=[[1, 2, 3]] * n), "ids list, must be int64"),  # type: ignore[arg-type]
        (lambda n: Drafts(ids=ids(n, 1, 2, 3).int()), "ids int32 ["),
        (lambda n: Drafts(ids=ids(n + 1, 1, 2, 3)), "must be int64 ["),
        (lambda n: Drafts(ids=ids(n, 1), parents=ids(n, 0)), "drafts chains, and propose gave a tree"),
        (lambda n: Drafts(ids=ids(n, 1, 2), probs=torch.ones(n, 3, 211)), "probs float32 ["),
    ],
    ids=["nothing", "a tensor", "a list", "int32", "rows", "a tree", "probs"],
)
def test_what_cannot_be_used_is_named(tiny_path: Path, give: Callable[[int], Any], word: str) -> None:
    for output in answers(tiny_path, rough(give)):
        assert output.error is not None
        assert "PluginError: Rough." in output.error
        assert word in output.error


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (None, "no SpeculatorSpec"),
        (SpeculatorSpec(drafts="3"), "drafts is '3', must be a whole number from 1 on"),  # type: ignore[arg-type]
        (SpeculatorSpec(drafts=2.5), "drafts is 2.5"),  # type: ignore[arg-type]
        (SpeculatorSpec(drafts=True), "drafts is True"),
        (SpeculatorSpec(drafts=2, depth=0), "depth is 0"),
        (SpeculatorSpec(drafts=2, weight_bytes=-5), "weight_bytes is -5"),
        (SpeculatorSpec(drafts=2, hidden="kep"), "hidden is 'kep', must be one of none, kept, all"),  # type: ignore[arg-type]
        (SpeculatorSpec(drafts=2, hidden="all"), "attach raised NotImplementedError"),
    ],
)
def test_what_describe_or_attach_does_wrong_is_named(tiny_path: Path, spec: Any, word: str) -> None:
    with pytest.raises(PluginError) as caught:
        answers(tiny_path, rough(lambda n: Drafts(ids=ids(n, 1)), spec))
    assert word in str(caught.value)
    assert "rough" in str(caught.value)


def test_one_that_only_follows_the_contract(tiny_path: Path) -> None:
    """Without inheriting, and so without what the contract has itself."""
    members = {name: value for name, value in vars(Rough).items() if not name.startswith(("_abc", "__"))}
    duck = type("Duck", (), members | {"give": staticmethod(lambda n: Drafts(ids=ids(n, 8, 9, 10)))})
    duck.capturable = duck.needs_host_token = False  # type: ignore[attr-defined]
    expected = [output.raise_for_error().token_ids for output in answers(tiny_path)]
    assert [output.raise_for_error().token_ids for output in answers(tiny_path, duck)] == expected
    del duck.describe  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as caught:
        answers(tiny_path, duck)
    assert str(caught.value).count("describe") == 1


def test_plugins_that_are_not_in_a_list_or_no_objects(tiny_path: Path) -> None:
    class Plugin:
        @hookimpl
        def pegboard_parts(self) -> Any:
            return ()

    twice = Plugin()
    for given, word in (
        (Plugin(), "must be a list of plugin objects"),
        ([Plugin], "put in an instance of it, Plugin()"),
        (["phrase_plugin"], "import the module"),
        ([twice, twice], "name it once"),
    ):
        with pytest.raises(ConfigError) as caught:
            Engine(tiny_path, device="cpu", plugins=given)  # type: ignore[arg-type]
        assert word in str(caught.value)
